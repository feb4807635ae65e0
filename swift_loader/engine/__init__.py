"""Runs a scheduler over an executor, and hands its batches to the loop."""
