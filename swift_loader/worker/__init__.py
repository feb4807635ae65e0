"""The worker's side: the code of the template process and of the workers forked from it.

Nothing here imports the trainer's side. Nothing imports torch at start: a worker has torch only if its dataset does.
"""
