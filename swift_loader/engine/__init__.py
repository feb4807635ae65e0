"""The trainer's side: who builds which batch, and what becomes of it."""
