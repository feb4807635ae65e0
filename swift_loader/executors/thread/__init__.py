"""Worker threads: they build batches in the trainer, beside the loop's thread."""
