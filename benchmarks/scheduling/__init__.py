"""What `scheduler.py` measures."""
