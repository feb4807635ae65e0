"""A module that opens a file when it is imported, as some libraries do with their tables."""

from pathlib import Path

CONTENT_FILE = Path(__file__).with_name("storm_datasets.py").open("rb", buffering=0)
