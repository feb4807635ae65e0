"""What runs in the processes that run the user's dataset. It measures, and judges nothing."""
