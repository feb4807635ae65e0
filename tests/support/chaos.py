"""Kills workers and templates at random while loops run, and looks at every byte that arrives."""

from __future__ import annotations

import time
import warnings
from collections import Counter, deque
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from typing import Any

from swift_loader import SwiftLoader, SwiftLoaderWarning
from tests.support.checked import Checked, Reference, check_batch, digest, environment
from tests.support.faults import environ_of
from tests.support.helpers import SWITCH, make_loader
from tests.support.killer import STOPS_IN_SLOT_WRITE, Aim, Killer

_MAX_EPOCHS = 400
_KEPT_BATCHES = 6
_NUM_REFERENCE_EPOCHS = 3
"""Epochs are gone through again: a loader without workers is slow."""


@dataclass(frozen=True, slots=True)
class Case:
    """A loop, and what is done to its workers."""

    seed: int
    workers: int
    in_order: bool
    num_kills: int
    """Half of them at random moments, half of them aimed into a write."""
    num_templates: int = 2
    start_method: str = "template"
    multithread: bool = True
    is_narrow: bool = False
    """Whether messages are large and pipes narrow, so that workers block in a send."""
    timeout_s: float | None = 20.0

    def aims(self) -> list[Aim]:
        """Return whom to kill, in random order."""
        aimed = [Aim.SENDING, Aim.SLOT_WRITE] if self.is_narrow else [Aim.SLOT_WRITE]
        half = self.num_kills // 2
        aims = [aimed[number % len(aimed)] for number in range(half)]
        aims += [Aim.ALL] * (half // (3 * self.workers))
        num_single = self.num_kills - half - self.workers * aims.count(Aim.ALL)
        aims += [Aim.UNREAD if number % 3 == 0 else Aim.ANYONE for number in range(num_single)]
        aims += [Aim.TEMPLATE] * (self.num_templates if self.start_method == "template" else 0)
        Random(self.seed).shuffle(aims)
        return aims


def run_case(case: Case) -> Counter[Aim]:
    """Run a loop until all has been done to its workers; fail if it shows, or if the count of restarts is another.

    Returns how many were killed.
    """
    options: dict[str, Any] = {"kwargs": {"narrow": case.is_narrow}, "batch_size": 4, "seed": case.seed}
    reference = Reference(lambda: make_loader(Checked, workers=0, **options))
    loader = make_loader(
        Checked,
        workers=case.workers,
        in_order=case.in_order,
        start_method=case.start_method,
        multithread=case.multithread,
        timeout=case.timeout_s,
        validate=False,  # the killer needs a loader that stands
        **options,
    )
    with warnings.catch_warnings(), ExitStack() as variables, loader:
        faults = environ_of(STOPS_IN_SLOT_WRITE.format(seed=case.seed))
        for name, value in {SWITCH: "0", **faults}.items():
            variables.enter_context(environment(name, value))
        warnings.simplefilter("ignore", SwiftLoaderWarning)
        loader.start(0)
        with Killer(loader, case.aims(), Random(case.seed)) as killer:
            _run_epochs(loader, killer, reference, case)
        killer.check()
        restarts = loader.report()["worker_restarts"]
    num_kills = killer.kills.total()
    assert restarts == num_kills, f"{restarts} restarts were counted, but {num_kills} processes killed"
    return killer.kills


def _run_epochs(loader: SwiftLoader, killer: Killer, reference: Reference, case: Case) -> None:
    rng = Random(case.seed + 1)
    for number in range(_MAX_EPOCHS):
        epoch = number % _NUM_REFERENCE_EPOCHS
        loader.set_epoch(epoch)
        reference.compare(_run_epoch(loader, rng), epoch, in_order=case.in_order)
        if killer.is_done:
            return
    raise AssertionError(f"not everybody was killed within {_MAX_EPOCHS} epochs: {killer.kills}")


def _run_epoch(loader: SwiftLoader, rng: Random) -> list[bytes]:
    """Return the digests of an epoch's batches. Some are kept for a while, and must stay what they were."""
    got: list[bytes] = []
    kept: deque[tuple[dict[str, Any], bytes]] = deque()
    for batch in loader:
        check_batch(batch)
        got.append(digest(batch))
        kept.append((batch, got[-1]))
        if rng.random() < 0.1:
            time.sleep(0.01)  # the loop's own work: meanwhile batches get ready
        while len(kept) > rng.randrange(_KEPT_BATCHES):
            old, before = kept.popleft()
            assert digest(old) == before, "a batch changed while it was kept"
    return got
