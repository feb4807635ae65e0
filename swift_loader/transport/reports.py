"""What a process that has built the dataset says of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["BuildReport", "Checksums", "Verdict"]

Checksums = tuple[tuple[int, int], ...]
"""(dataset index, checksum) of some samples."""


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a process says of the dataset that it has built, so that the trainer can compare it with others."""

    num_samples: int
    hash_of_text: int
    """Of a fixed string: it differs where the hash seed does."""
    checksums: Checksums = ()
    """Empty if this is no build of its own, or none could be taken."""


class Verdict(str, Enum):
    """Why a sample differs from that of another build."""

    UNSTABLE = "unstable"
    """It is another one each time it is fetched, or in each process: that says nothing of the build."""
    RANDOM = "random"
    """Each build gives another one: something is drawn from a generator that isn't keyed."""
    UNKNOWN = "unknown"
    """One of the two others: building it again failed, or took too long."""
    CHANGED = "changed"
    """It stays as it is here: what it is read from has changed in between."""
