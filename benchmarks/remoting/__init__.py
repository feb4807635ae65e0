"""The cluster, the loads, the measurements, the cost model and the chart of `remote.py`."""
