"""What `stages.py` measures."""
