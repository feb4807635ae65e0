"""The parts of benchmarks/dataloader.py."""
