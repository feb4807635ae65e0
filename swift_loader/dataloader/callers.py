"""Tells which framework calls, where frameworks expect different things of the same call."""

from __future__ import annotations

import sys

_LIGHTNING = ("lightning.pytorch.", "pytorch_lightning.", "swift_loader.integrations.lightning")


def is_called_by_lightning() -> bool:
    """Return whether the caller's caller is a Lightning Trainer.

    Where a Trainer resumes from a checkpoint of an epoch's last batch, it takes the next batch for the first one of the
    next epoch (`_FitLoop.reset`), and a loader that says that the epoch is over makes it skip a whole epoch. In a plain
    loop, and with torchdata's `StatefulDataLoader`, the same state means that the rest of the epoch is empty.
    """
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(_LIGHTNING)  # noqa: SLF001
