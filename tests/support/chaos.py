"""Kills workers and templates at random while loops run, and looks at every byte that arrives.

`python -m tests.support.chaos --minutes 10 --seed 1` goes on with ever other seeds; test_chaos.py runs a few.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter, deque
from dataclasses import dataclass
from random import Random
from typing import Any

from swift_loader import SwiftLoader, SwiftLoaderWarning
from swift_loader.transport.failpoints import VARIABLE
from tests.support.checked import Checked, Reference, check_batch, digest, environment
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


@dataclass(frozen=True, slots=True)
class Tally:
    """What a case came to."""

    num_epochs: int
    num_batches: int
    kills: Counter[Aim]


def random_case(seed: int) -> Case:
    """Return one of many cases."""
    rng = Random(seed)
    is_spawn = rng.random() < 0.1
    return Case(
        seed=seed,
        workers=rng.randint(2, 4),
        in_order=rng.random() < 0.5,
        num_kills=4 if is_spawn else 24,
        start_method="spawn" if is_spawn else "template",
        multithread=rng.random() < 0.7,
        is_narrow=rng.random() < 0.5,
    )


def run_case(case: Case) -> Tally:
    """Run a loop until all has been done to its workers; fail if it shows, or if the count of restarts is another."""
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
    failpoints = STOPS_IN_SLOT_WRITE.format(seed=case.seed)
    with warnings.catch_warnings(), environment(SWITCH, "0"), environment(VARIABLE, failpoints), loader:
        warnings.simplefilter("ignore", SwiftLoaderWarning)
        loader.start(0)
        with Killer(loader, case.aims(), Random(case.seed)) as killer:
            num_epochs, num_batches = _run_epochs(loader, killer, reference, case)
        killer.check()
        restarts = loader.report()["worker_restarts"]
    num_kills = killer.kills.total()
    assert restarts == num_kills, f"{restarts} restarts were counted, but {num_kills} processes killed"
    return Tally(num_epochs, num_batches, killer.kills)


def _run_epochs(loader: SwiftLoader, killer: Killer, reference: Reference, case: Case) -> tuple[int, int]:
    rng = Random(case.seed + 1)
    num_batches = 0
    for number in range(_MAX_EPOCHS):
        epoch = number % _NUM_REFERENCE_EPOCHS
        loader.set_epoch(epoch)
        got = _run_epoch(loader, rng)
        reference.compare(got, epoch, in_order=case.in_order)
        num_batches += len(got)
        if killer.is_done:
            return number + 1, num_batches
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


def main() -> None:
    """Run cases until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    deadline_s = time.monotonic() + 60 * arguments.minutes
    total: Counter[Aim] = Counter()
    num_cases = num_epochs = num_batches = 0
    while time.monotonic() < deadline_s:
        case = random_case(arguments.seed + num_cases)
        print(case, flush=True)
        tally = run_case(case)
        total += tally.kills
        num_cases, num_epochs = num_cases + 1, num_epochs + tally.num_epochs
        num_batches += tally.num_batches
        print(f"    {tally.num_epochs} epochs, {tally.kills.total()} kills", flush=True)
    print(f"\n{num_cases} cases, {num_epochs} epochs, {num_batches} batches, {total.total()} kills:")
    for aim, count in total.most_common():
        print(f"{count:8} {aim.value}")


if __name__ == "__main__":
    main()
