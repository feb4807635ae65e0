"""Chooses the number of workers while training runs."""
