"""The worker's side: the code of the root, of templates, and of workers, forked, called by torch or by Ray.

Nothing here imports the trainer's side. Nothing imports torch at start: a worker has it if its dataset does, or if it
works for a `DataLoader`.
"""
