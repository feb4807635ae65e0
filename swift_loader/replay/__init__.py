"""Rebuilds batches of a past run: for a look at the batch where the loss became NaN, or to compare two machines.

state       seed, order, epoch and dataset length of the run           states reads it from a checkpoint
source      the dataset, or a loader with the run's options            sources
position    where the batch begins in its epoch                        past_batch
batch       built in this process by the code that workers run         past_batch
leaves      shapes, checksums and what isn't finite                    leaves
command     all of it as `swift-loader replay`                         command
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swift_loader.replay.leaves import checksum
    from swift_loader.replay.past_batch import Rebuilt, rebuild
    from swift_loader.replay.states import read_state

__all__ = ["Rebuilt", "checksum", "read_state", "rebuild"]

_HOMES = {"Rebuilt": "past_batch", "checksum": "leaves", "read_state": "states", "rebuild": "past_batch"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
