"""The parts of the benchmark of what comes after the loader, see `device.py`."""
