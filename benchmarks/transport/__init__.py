"""The systems that carry batches, the cases they are timed with, and the ideal that sends nothing."""
