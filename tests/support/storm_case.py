"""What one case of a storm consists of: a dataset, loaders one after another, and what happens between their batches.

All of it is drawn from one seed, before anything runs: the same seed is the same case again. No I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from random import Random

from tests.support.storm_datasets import READS, Sizes

NUM_EPOCHS = 6
"""Epochs of any case are below."""

_NUM_SAFE = 16
"""The first samples never fail: the first batch has to succeed."""

_BATCH_SIZES = [1, 1, 2, 3, 4, 8, 16]

_LONG_TIMEOUT_S, _SHORT_TIMEOUT_S = 20.0, 2.0
"""A fresh interpreter takes a while on a busy machine."""


_SLOW_S = 0.005
"""Long enough for the loop to wait for batches most of the time."""


class Deed(Enum):
    """What happens between two batches."""

    KILL = "a worker is killed"
    KILL_TEMPLATE = "the template is killed"
    STOP = "a worker is stopped, and goes on if nobody kills it"
    CHDIR = "the trainer changes the directory, to one with other files of the same names"
    ENVIRON = "the trainer changes its environment"
    FORK = "the trainer forks; the child keeps batches"
    FORK_NEXT = "the trainer forks; the child keeps batches and asks the iterator for one"
    GROW = "the dataset's folder gets more files"
    REPLACE = "the dataset's file is replaced by another one"
    PAUSE = "the trainer is stopped for longer than the timeout"
    IDLE = "the loop takes its time"


_WEIGHTS = {
    Deed.KILL: 6.0,
    Deed.KILL_TEMPLATE: 2.0,
    Deed.STOP: 0.7,
    Deed.CHDIR: 2.0,
    Deed.ENVIRON: 2.0,
    Deed.FORK: 3.0,
    Deed.FORK_NEXT: 1.0,
    Deed.IDLE: 3.0,
}


@dataclass(frozen=True, slots=True)
class Traits:
    """What is particular about a kind of dataset."""

    provoked_by: tuple[Deed, ...] = ()
    """What is likely to show that its workers differ, in this order."""
    is_clean: bool = False
    """Whether the trainer itself may build it: the constructor leaves nothing behind."""
    may_be_instance: bool = False
    compares_with_itself: bool = False
    """Whether another process builds another dataset: only the workers of one loader can be held to agree."""
    differs_by_itself: bool = False
    """Whether two builds differ although nothing has changed: the loader may refuse it."""


_REPLACED = (Deed.REPLACE, Deed.KILL_TEMPLATE)
_MOVED = (Deed.CHDIR, Deed.KILL_TEMPLATE)
_CHANGES = {Deed.GROW, Deed.REPLACE}
"""Of the data; that is noticed only with `validate`."""

_GROWN = (Deed.GROW, Deed.KILL, Deed.KILL_TEMPLATE)

TRAITS = {
    "arrays": Traits(_REPLACED, is_clean=True, may_be_instance=True),
    "kept open": Traits((Deed.REPLACE, Deed.KILL)),
    "relative": Traits(_MOVED, is_clean=True),
    "relative, kept open": Traits(_MOVED),
    "relative, opened late": Traits(_MOVED),
    "changes directory": Traits(_MOVED),
    "changes directory, kept open": Traits(_MOVED),
    "environment": Traits((Deed.ENVIRON, Deed.KILL_TEMPLATE), is_clean=True),
    "hashes": Traits((Deed.KILL_TEMPLATE,), compares_with_itself=True),
    "hashes and thread": Traits((Deed.KILL,), compares_with_itself=True),
    "unkeyed": Traits((Deed.KILL_TEMPLATE,), compares_with_itself=True, differs_by_itself=True),
    "unkeyed, kept open": Traits((Deed.KILL,), compares_with_itself=True, differs_by_itself=True),
    "cached open": Traits(),
    "open by import": Traits(),
    "thread": Traits((Deed.REPLACE, Deed.KILL)),
    "opened late": Traits((Deed.KILL,)),
    "draws in constructor": Traits((Deed.KILL_TEMPLATE,), is_clean=True),
    "augments": Traits(is_clean=True, may_be_instance=True),
    "grows": Traits(_GROWN),
    "grows, kept open": Traits(_GROWN),
}


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens before the batch with this number of a pass is asked for."""

    at: int
    deed: Deed
    seed: int


@dataclass(frozen=True, slots=True)
class Pass:
    """One way through an epoch, or a part of it."""

    epoch: int | None
    """For `set_epoch`; None goes on to the next."""
    breaks_at: int | None
    """Batches after which the loop breaks."""
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Leg:
    """One loader of a case; the first goes on from nothing, each other one from the state of the one before."""

    workers: int
    start_method: str
    in_order: bool
    multithread: bool
    data_queue_size: int
    dataset_per_worker: bool
    timeout_s: float
    slow_s: float
    """What each sample takes."""
    worker_restarts: int
    validate: bool
    starts_by_itself: bool
    """Whether the first `next` starts it."""
    closes_in_midst: bool
    """Whether the last pass is ended by `close()`."""
    hoard: int
    """Batches, and parts of batches, that the loop keeps at most."""
    passes: tuple[Pass, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """All of it."""

    seed: int
    kind: str
    num_samples: int
    sizes: str
    in_bulk: bool
    as_instance: bool
    fails: tuple[int, ...]
    on_error: str
    batch_size: int
    shuffle: bool
    nearby_shuffle: int | None
    drop_last: bool
    uneven: str
    num_consumers: int
    ignores_sigchld: bool
    num_descriptors: int
    """That the trainer has open besides."""
    closes_standard: bool
    """Whether the trainer has its descriptors 0, 1 and 2 closed, as a daemon may."""
    legs: tuple[Leg, ...]

    @property
    def name(self) -> str:
        """The kind, as it is counted."""
        return f"{self.kind}{', instance' if self.as_instance else ''}{', in bulk' if self.in_bulk else ''}"

    def describe(self) -> str:
        """Return all that was drawn, a leg a line."""
        lines = [f"case {self.seed}: {self._list(('seed', 'legs'))}"]
        for leg in self.legs:
            lines.append("  " + ", ".join(f"{name}={getattr(leg, name)!r}" for name in leg.__slots__[:-1]))
            for one in leg.passes:
                events = "; ".join(f"{event.at}: {event.deed.name}" for event in one.events)
                lines.append(f"    epoch={one.epoch}, breaks_at={one.breaks_at}, {events or 'nothing happens'}")
        return "\n".join(lines)

    def _list(self, without: tuple[str, ...]) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__ if name not in without)


def draw_case(seed: int, kind: str | None = None) -> Case:
    """Return the case of a seed; with a kind, one of that kind."""
    rng = Random(seed)
    drawn_kind = rng.choice(sorted(READS))
    kind = drawn_kind if kind is None else kind
    traits = TRAITS[kind]
    num_samples = rng.choice([rng.choice([0, 1]), rng.randint(2, 7), *(rng.randint(8, 60), rng.randint(60, 300)) * 3])
    batch_size = rng.choice(_BATCH_SIZES)
    num_consumers = 2 if rng.random() < 0.15 else 1
    sizes = rng.choice([Sizes.EQUAL, Sizes.EQUAL, Sizes.RAGGED, Sizes.WILD])
    if traits.compares_with_itself:
        sizes = Sizes.EQUAL
    if sizes == Sizes.WILD:
        batch_size = min(batch_size, 3)  # so that there are tiny batches among the others
    fails = _draw_failing(rng, num_samples)
    on_error = rng.choice(["raise", "skip", "replace"])
    may_be_unordered = not (fails and on_error == "raise")
    num_batches = num_samples // (batch_size * num_consumers)
    return Case(
        seed=seed,
        kind=kind,
        num_samples=num_samples,
        sizes=sizes,
        in_bulk=rng.random() < 0.2,
        as_instance=traits.may_be_instance and rng.random() < 0.4,
        fails=fails,
        on_error=on_error,
        batch_size=batch_size,
        shuffle=rng.random() < 0.7,
        nearby_shuffle=rng.choice([None, 0, 7]),
        drop_last=rng.random() < 0.2,
        uneven=rng.choice(["pad", "drop", "exact"]),
        num_consumers=num_consumers,
        ignores_sigchld=rng.random() < 0.1,
        num_descriptors=1100 if rng.random() < 0.05 else 0,
        closes_standard=rng.random() < 0.05,
        legs=tuple(
            _draw_leg(rng, traits, num_batches, may_be_unordered=may_be_unordered) for _ in range(rng.choice([1, 1, 2]))
        ),
    )


def _draw_failing(rng: Random, num_samples: int) -> tuple[int, ...]:
    if num_samples <= _NUM_SAFE or rng.random() < 0.75:
        return ()
    return tuple(sorted({rng.randrange(_NUM_SAFE, num_samples) for _ in range(rng.randint(1, 3))}))


def _draw_leg(rng: Random, traits: Traits, num_batches: int, *, may_be_unordered: bool) -> Leg:
    workers = 0 if traits.is_clean and rng.random() < 0.05 else rng.choice([1, 2, 2, 3, 4])
    start_method = "spawn" if rng.random() < 0.15 else "template"
    is_paused = workers > 0 and start_method == "template" and rng.random() < 0.03
    num_passes = rng.randint(1, 3)
    passes = []
    for number in range(num_passes):
        breaks_at = rng.randint(1, num_batches) if num_batches and rng.random() < 0.25 else None
        epoch = rng.randrange(NUM_EPOCHS) if rng.random() < 0.2 else None
        events = _draw_events(rng, traits, num_batches, is_paused=is_paused and number == 0)
        passes.append(Pass(epoch, breaks_at, events))
    deeds = {event.deed for one in passes for event in one.events}
    may_change = traits.differs_by_itself or not deeds.isdisjoint(_CHANGES)
    is_hurried = is_paused or (Deed.STOP in deeds and start_method == "template" and rng.random() < 0.3)
    return Leg(
        workers=workers,
        start_method=start_method,
        in_order=not may_be_unordered or rng.random() < 0.7,
        multithread=rng.random() < 0.7,
        data_queue_size=rng.choice([1, 2, 3, 10]),
        dataset_per_worker=rng.random() < 0.2,
        timeout_s=_SHORT_TIMEOUT_S if is_hurried else _LONG_TIMEOUT_S,
        slow_s=_SLOW_S if is_paused else 0.0,
        worker_restarts=0 if rng.random() < 0.05 else rng.choice([3, 3, 100]),
        validate=may_change or rng.random() < 0.8,
        starts_by_itself=rng.random() < 0.3,
        closes_in_midst=rng.random() < 0.1,
        hoard=rng.choice([0, 3, 10, 400]),
        passes=tuple(passes),
    )


def _draw_events(rng: Random, traits: Traits, num_batches: int, *, is_paused: bool) -> tuple[Event, ...]:
    if is_paused:  # nothing else: nobody may be replaced
        return (Event(rng.randint(0, num_batches), Deed.PAUSE, rng.randrange(2**32)),)
    deeds = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=rng.choice([0, 0, 1, 2, 4]))
    if rng.random() < 0.4:
        position = rng.randint(0, len(deeds))
        deeds[position:position] = traits.provoked_by
    places = sorted(rng.randint(0, num_batches) for _ in deeds)
    return tuple(Event(at, deed, rng.randrange(2**32)) for at, deed in zip(places, deeds, strict=True))
