"""Places where batches are built: processes, threads, or the calling thread. They act, and decide nothing."""
