"""The trainer's side of the worker processes: it assigns batches, receives them and replaces dead workers."""
