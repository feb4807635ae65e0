"""How samples become a batch, and the structure of a batch. Runs in workers and in the trainer."""
