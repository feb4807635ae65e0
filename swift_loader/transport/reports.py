"""What a process reports about the dataset that it has built. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["BuildReport", "Checksums", "Verdict"]

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


class Verdict(str, Enum):
    """Why a sample differs from the one of another build."""

    UNSTABLE = "unstable"
    """The sample changes with each fetch, or from process to process. It says nothing about the build."""
    RANDOM = "random"
    """The sample changes with each build: the build draws from a generator that isn't seeded the same way each time."""
    UNKNOWN = "unknown"
    """Either RANDOM or CHANGED: another build failed or took too long."""
    CHANGED = "changed"
    """The sample is the same in each build here: its source, such as a file, has changed between the builds."""
