"""The worker's side: what runs in the template process and in the workers forked from it.

Nothing here imports the trainer's side, nor torch: a worker knows torch only if its dataset does.
"""
