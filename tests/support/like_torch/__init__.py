"""Holds the drop-in class against torch's: the same construction with both, the same observations."""
