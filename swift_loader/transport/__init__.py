"""Carries batches from a worker to the trainer: channels and frames, shared memory, and the codec on top."""
