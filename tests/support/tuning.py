"""What tests of `worker_per_consumer="auto"` need: samples that take time, loops that take time, and a hasty tuner.

Importing it is part of every worker's start, so it imports little.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.checked import Checked
from tests.support.datasets import Counting

if TYPE_CHECKING:
    import pytest

    from swift_loader import SwiftLoader

SAMPLE_S = 0.005
STEP_S = 0.004
"""With batches of 4 samples, 5 workers feed the loop."""


class SleepingChecked(Checked):
    """The samples of `Checked`, each of which takes a while."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(SAMPLE_S)
        return super().__getitem__(index)


class SleepingCounting(Counting):
    """The samples of `Counting`, each of which takes a while."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(SAMPLE_S)
        return super().__getitem__(index)


class Following(Counting):
    """Samples that take as long as a file says, in seconds."""

    def __init__(self, num_samples: int = 200, *, path: str) -> None:
        super().__init__(num_samples)
        self.path = Path(path)

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(float(self.path.read_text() or 0))
        return super().__getitem__(index)


def loop(loader: SwiftLoader, step_s: float = STEP_S) -> Iterator[Any]:
    """Yield the batches of one pass, and work for a while after each."""
    for batch in loader:
        yield batch
        time.sleep(step_s)


def be_hasty(monkeypatch: pytest.MonkeyPatch, window_s: float = 0.15) -> None:
    """Let tuners decide after this time. The short windows are noisy, so what they find is only about right."""
    monkeypatch.setattr("swift_loader.report.tuning.WINDOW_S", window_s)
    monkeypatch.setattr("swift_loader.report.tuning.CHECK_NS", 1_000_000)


def is_settled(loader: SwiftLoader) -> bool:
    """Return whether the search for a number is over. It isn't before the first pass."""
    from swift_loader.report.tuning import TunerState

    autotuner = None if loader._session is None else loader._session.observer.autotuner
    return autotuner is not None and autotuner._tuner.state is TunerState.SETTLED
