"""Ranks of one node that need the same data: one of them loads it, the others map the same memory. Linux only."""
