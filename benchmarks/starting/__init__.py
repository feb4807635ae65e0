"""The probes that `startup.py` runs, each in a fresh process."""
