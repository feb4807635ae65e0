"""Places where batches are built: worker processes, or the calling thread. They act, and decide nothing."""
