"""The loads and the loops of `autotune.py`."""
