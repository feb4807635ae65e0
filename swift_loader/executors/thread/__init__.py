"""Worker threads: they build batches in the trainer, beside the loop's thread.

Threads post events, and the loop's thread is the only one that receives them. So it also sends the tasks.
"""
