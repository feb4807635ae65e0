"""Runs loaders through everything at once, for long, and holds them to using up nothing.

`python -m tests.support.soak --minutes 30 --seed 1` prints a table at the end; test_soak.py runs it for half a minute.

A run is a series of journeys: a dataset with some peculiarity, gone through by one loader after another, each of which
goes on where the one before was left.
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any

from swift_loader import SwiftLoader, SwiftLoaderWarning
from tests.support.checked import Checked, Reference, check_batch, collate_flat, digest, environment
from tests.support.figures import Figures, Measured
from tests.support.helpers import SWITCH, make_loader, wait_until
from tests.support.killer import Aim, Killer

_TIMEOUT_S = 2.0
MIN_PASSES = 40
"""In fewer, what loaders need at first looks like growth."""
_NBYTES = 2000
_BATCH_SIZE = 4

_FAULTS = {Aim.ANYONE: 8, Aim.UNREAD: 4, Aim.ALL: 4, Aim.TEMPLATE: 2, Aim.HANG: 1}
"""How often, compared with one another; the last two take a second."""


@dataclass(frozen=True, slots=True)
class Journey:
    """What stays as it is while one loader follows another."""

    seed: int
    on_error: str
    has_big_batch: bool

    def options(self) -> dict[str, Any]:
        """Return those of all its loaders."""
        kwargs: dict[str, Any] = {"nbytes": _NBYTES, "fails_every": 0 if self.on_error == "raise" else 30}
        if self.has_big_batch:  # 50 times as large as the others
            kwargs |= {"big_at": 77, "big_nbytes": 50 * _BATCH_SIZE * _NBYTES}
        return {
            "kwargs": kwargs,
            "batch_size": _BATCH_SIZE,
            "seed": self.seed,
            "on_error": self.on_error,
            "collate_fn": collate_flat,
        }


@dataclass(frozen=True, slots=True)
class Leg:
    """One loader of a journey."""

    workers: int
    in_order: bool
    multithread: bool
    start_method: str
    device: str | None
    num_passes: int
    hoard: int
    """Batches that the user keeps, at most."""


@dataclass(slots=True)
class Soak:
    """A run in progress."""

    seed: int
    rng: Random = field(init=False)
    figures: Figures = field(default_factory=Figures)
    kills: Counter[Aim] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)

    def run(self, seconds: float, is_enough: Callable[[], bool] = lambda: True) -> None:
        """Make journeys until the time is up and they are enough; fail if anything is amiss."""
        deadline_s = time.monotonic() + seconds
        with warnings.catch_warnings(), environment(SWITCH, "0"):  # what a loader starts shall end with it
            warnings.simplefilter("ignore", SwiftLoaderWarning)
            while time.monotonic() < deadline_s or not is_enough():
                self._travel(deadline_s)
        if len(self.figures.rows) >= MIN_PASSES:
            self.figures.check()

    def _travel(self, deadline_s: float) -> None:
        rng = self.rng
        journey = Journey(rng.randrange(2**32), rng.choice(["raise", "skip", "replace"]), rng.random() < 0.3)
        reference = Reference(lambda: make_loader(Checked, workers=0, **journey.options()))
        self.counts["journeys"] += 1
        state: dict[str, int] | None = None
        position = (0, 0)
        for _ in range(rng.randint(1, 4)):
            leg = self._draw_leg()
            before = Measured.steady()
            state, position = self._run_leg(journey, leg, reference, state, position)
            self.figures.note_closed(before)
            if time.monotonic() > deadline_s:
                return

    def _draw_leg(self) -> Leg:
        rng = self.rng
        return Leg(
            workers=rng.randint(1, 4),
            in_order=rng.random() < 0.6,
            multithread=rng.random() < 0.7,
            start_method="spawn" if rng.random() < 0.1 else "template",
            device="cpu" if rng.random() < 0.3 else None,
            num_passes=rng.randint(1, 8),
            hoard=rng.choice([0, 5, 40]),
        )

    def _run_leg(
        self, journey: Journey, leg: Leg, reference: Reference, state: dict[str, int] | None, position: tuple[int, int]
    ) -> tuple[dict[str, int], tuple[int, int]]:
        """Return the state at the end, and the (epoch, batch) that it stands for."""
        loader = make_loader(
            Checked,
            workers=leg.workers,
            in_order=leg.in_order,
            multithread=leg.multithread,
            start_method=leg.start_method,
            timeout=_TIMEOUT_S,
            **journey.options(),
        )
        self.counts["loaders"] += 1
        with loader:
            if state is not None:
                loader.load_state_dict(state)
                self.counts["resumes, in mid-epoch" if position[1] else "resumes"] += 1
            loader.start(0, leg.device)
            fresh = Measured.steady()
            for number in range(leg.num_passes):
                is_last = number == leg.num_passes - 1
                end = self._run_pass(loader, leg, reference, position, may_break=leg.in_order or not is_last)
                # A new pass after `break` is the next epoch's; a state goes on where the loop stopped.
                position = end if is_last or not end[1] else (end[0] + 1, 0)
                self.figures.note_pass(leg.workers, f"{leg.start_method}, big batch: {journey.has_big_batch}", fresh)
            return loader.state_dict(), position

    def _run_pass(
        self, loader: SwiftLoader, leg: Leg, reference: Reference, position: tuple[int, int], *, may_break: bool
    ) -> tuple[int, int]:
        """Return the (epoch, batch) that comes next; batch 0 at an epoch's end."""
        epoch, begin = position
        num_left = len(reference.epoch(epoch)) - begin
        limit = self.rng.randrange(1, num_left) if may_break and num_left > 1 and self.rng.random() < 0.3 else None
        got: list[bytes] = []
        with ExitStack() as stack:
            killer = stack.enter_context(Killer(loader, self._draw_faults(), Random(self.rng.random()), 0.01))
            hoard = Hoard(leg.hoard, self.rng)
            for batch in loader:
                check_batch(batch)
                got.append(digest(batch))
                hoard.keep(batch, got[-1])
                if len(got) == limit:
                    break
            hoard.drop_all()
        del batch
        killer.check()
        _have_somebody_listen(loader)
        wait_until(lambda: killer.is_dealt_with, "those that were killed are replaced")
        reference.compare(got, epoch, begin=begin, in_order=leg.in_order, is_whole=limit is None)
        self.kills += killer.kills
        self.counts["batches"] += len(got)
        self.counts["breaks"] += limit is not None
        return (epoch, begin + limit) if limit is not None else (epoch + 1, 0)

    def _draw_faults(self) -> list[Aim]:
        num = self.rng.choice([0, 1, 2, 4])
        return self.rng.choices(list(_FAULTS), list(_FAULTS.values()), k=num)

    def table(self) -> str:
        """Return all figures."""
        lines = [f"{count:8} {name}" for name, count in self.counts.items()]
        lines += [f"{count:8} times killed: {aim.value}" for aim, count in self.kills.items()]
        return "\n".join([*lines, "", self.figures.table()])


def _have_somebody_listen(loader: SwiftLoader) -> None:
    """Have deaths noticed while the loop is away: after a quick one that broke off, nobody listens."""
    assert loader._session is not None
    dispatcher = loader._session.dispatcher
    assert dispatcher._receivers is not None
    assert dispatcher.error is None
    dispatcher._receivers.hand_over()


class Hoard:
    """Batches that the user keeps for a while; they must stay as they were."""

    def __init__(self, size: int, rng: Random) -> None:
        self._size, self._rng = size, rng
        self._kept: list[tuple[dict[str, Any], bytes]] = []

    def keep(self, batch: dict[str, Any], its_digest: bytes) -> None:
        """Keep a batch, and drop others."""
        self._kept.append((batch, its_digest))
        while len(self._kept) > self._size or (self._kept and self._rng.random() < 0.2):
            self._drop(self._rng.randrange(len(self._kept)))

    def drop_all(self) -> None:
        """Keep nothing any more."""
        while self._kept:
            self._drop(0)

    def _drop(self, number: int) -> None:
        batch, before = self._kept.pop(number)
        assert digest(batch) == before, "a batch changed while it was kept"


def main() -> None:
    """Soak, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    import torch  # noqa: F401 - it opens files and starts threads, once

    gc.freeze()  # the loader's objects are few, and collected often
    soak = Soak(arguments.seed)
    try:
        soak.run(60 * arguments.minutes)
    finally:
        print(soak.table())


if __name__ == "__main__":
    main()
