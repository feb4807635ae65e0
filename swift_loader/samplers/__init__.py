"""Samplers for a torch DataLoader: split over ranks, seeded, and resumable after any batch."""
