"""The workloads of `advice.py`."""
