"""The systems and the chart of `workers.py`."""
