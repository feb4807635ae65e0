"""Moves batches from the trainer's memory to the device."""
