"""What a process reports about the dataset that it has built. Pure."""

from __future__ import annotations

from dataclasses import dataclass

Checksums = tuple[tuple[int, int], ...]
"""(dataset index, checksum) of some samples."""


@dataclass(frozen=True, slots=True)
class BuildReport:
    """Describes the dataset that a process has built. The trainer compares the reports of all builds."""

    num_samples: int
    hash_of_text: int
    """Hash of a fixed string: two processes get the same value only if they have the same hash seed."""
    checksums: Checksums = ()
    """Empty if this process didn't build the dataset itself, or if no checksum could be taken."""
