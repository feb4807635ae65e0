"""Random runs of `mapped` datasets, each beside the same loader without workers over a plain dataset.

The plain dataset reads and transforms in its `__getitem__`. What it gives is due. test_mapped_runs.py runs cases. All
of a case is drawn from its seed before anything runs, so the same seed is the same case again.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil

from swift_loader import DataLoader, Mixture, SwiftLoader, TooManyErrors, WorkerDied, mapped, sample_rng
from tests.support.helpers import loader_children

NUM_EPOCHS = 9
"""Epochs of any case are below."""

CLOSE_S = 5.0
"""How long `close` may take."""

ALWAYS = 1 << 30
"""Of reads that never succeed."""

_SLOW_S = 0.003
_SHORT_WAIT_S = 0.001


class ReadFailed(Exception):
    """Of a source."""


class TransformFailed(Exception):
    """Of a transform."""


# What is mapped -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Rows of an array. Some are slow, some fail."""

    name: str
    num_rows: int
    folder: str
    """Where the attempts are counted, over all workers: a file per row, which grows by a byte each time."""
    failing: Mapping[int, int]
    """How often the reads of a row fail before they succeed."""
    slow: frozenset[int]

    def __len__(self) -> int:
        return self.num_rows

    def content(self, row: int) -> np.ndarray:
        if not 0 <= row < self.num_rows:
            raise IndexError(row)
        return np.array([row * 7919, len(self.name)], np.int64)

    def attempt(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return these rows. Raise if one of them fails, once all of them were tried."""
        _shorten_waits()
        failed = [row for row in rows if self._fails(row)]
        if failed:
            raise ReadFailed(f"row {failed[0]} of {self.name}")
        return [{"row": row, "x": self.content(row)} for row in rows]

    def _fails(self, row: int) -> bool:
        num_failures = self.failing.get(row, 0)
        if not num_failures:
            return False
        file = os.open(f"{self.folder}/{self.name}{row}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, b".")
            return os.fstat(file).st_size <= num_failures
        finally:
            os.close(file)

    def wait(self, rows: Sequence[int]) -> float:
        return _SLOW_S * sum(row in self.slow for row in rows)


def _shorten_waits() -> None:
    """Have this process repeat calls soon."""
    module: Any = sys.modules["swift_loader.worker.mapped"]
    assert hasattr(module, "_WAIT_S")
    module._WAIT_S = _SHORT_WAIT_S


class Items(Source):
    def __getitem__(self, row: int) -> Any:
        time.sleep(self.wait([row]))
        return self.attempt([row])[0]


class ItemsOrMany(Items):
    def __getitems__(self, rows: Sequence[int]) -> Any:
        time.sleep(self.wait(rows))
        return self.attempt(rows)


class OnlyMany(Source):
    def __getitems__(self, rows: Sequence[int]) -> Any:
        time.sleep(self.wait(rows))
        return tuple(self.attempt(rows))


class Fetches(Source):
    def fetch(self, rows: Sequence[int]) -> Any:
        time.sleep(self.wait(rows))
        return self.attempt(rows)

    def __getitem__(self, row: int) -> Any:
        raise AssertionError("it has fetch")


class FetchesAsync(Source):
    async def fetch(self, rows: Sequence[int]) -> Any:
        await asyncio.sleep(self.wait(rows))
        return self.attempt(rows)


KINDS: dict[str, type[Source]] = {kind.__name__: kind for kind in (Items, ItemsOrMany, OnlyMany, Fetches, FetchesAsync)}


@dataclass(frozen=True)
class Transform:
    """Adds what it draws."""

    draws: str | None
    in_place: bool
    failing: frozenset[int]
    """Rows for which it raises."""
    slow: frozenset[int]

    def __call__(self, raw: dict[str, Any]) -> dict[str, Any]:
        row, data = raw["row"], raw["x"]
        if row in self.slow:
            time.sleep(_SLOW_S)
        drawn = self._drawn(row)
        if row in self.failing:
            raise TransformFailed(f"row {row} of a transform")
        if not self.in_place:
            return {"row": row, "x": data + drawn}
        data += drawn
        raw["row"] = row
        return raw

    def _drawn(self, row: int) -> int:
        draws = self.draws
        if draws == "at times":
            draws = "numpy" if row % 3 == 0 else None
        match draws:
            case "python":
                return random.getrandbits(30)
            case "numpy":
                return int(np.random.randint(1 << 30))
            case "torch":
                import torch

                return int(torch.randint(1 << 30, ()))
            case "sample_rng":
                return int(sample_rng().integers(1 << 30))
            case "all":
                import torch

                first = random.getrandbits(20) + int(np.random.randint(1 << 20))
                return first + int(torch.randint(1 << 20, ())) + int(sample_rng().integers(1 << 20))
        return 0


GLOBAL_DRAWS = ("python", "numpy", "torch", "at times")


@dataclass(frozen=True)
class Plain:
    """What is due."""

    source: Source
    transform: Transform | None

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, row: int) -> Any:
        if self.source.failing.get(row) == ALWAYS:
            raise ReadFailed(f"row {row} of {self.source.name}")
        raw = {"row": row, "x": self.source.content(row)}
        return raw if self.transform is None else self.transform(raw)


@dataclass(frozen=True)
class Chosen:
    """A subset."""

    dataset: Any
    indices: list[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]


# Cases ----------------------------------------------------------------------------------------------------------------

SWIFT, OURS, TORCHS = "SwiftLoader", "DataLoader", "torch's DataLoader"


@dataclass(frozen=True)
class Pass:
    """One way through an epoch, or a part of it."""

    breaks_at: int | None = None
    """After so many batches the loop breaks."""
    goes_back_to: int | None = None
    """Then it loads the state that it had after this batch, and makes the next pass from there."""
    kills: tuple[int, ...] = ()
    """Before these batches a worker is killed."""


@dataclass(frozen=True)
class Leg:
    """One loader of a case; the first begins, each other one goes on from the state of the one before."""

    workers: int
    threads: bool
    reads: int | None
    retries: int
    options: dict[str, Any]
    passes: tuple[Pass, ...]
    start_method: str = "template"


@dataclass(frozen=True)
class Case:
    """All of it."""

    seed: int
    door: str
    kind: str
    nested: str
    num_rows: int
    options: dict[str, Any]
    """Of all loaders."""
    failing: dict[int, int]
    slow: frozenset[int]
    transform: Transform | None
    legs: tuple[Leg, ...] = field(default=())

    @property
    def has_processes(self) -> bool:
        return any(leg.workers and not leg.threads for leg in self.legs)


NESTED = ("alone", "Subset", "ConcatDataset", "ConcatDataset with a plain one", "Subset of a ConcatDataset", "Mixture")


def draw_case(seed: int, *, processes: bool | None = None) -> Case:
    """Return the case of a seed. `processes`: whether it has worker processes, which take their time."""
    rng = Random(seed)
    if processes is None:
        processes = rng.random() < 0.15
    door = rng.choices([SWIFT, OURS, TORCHS], [6, 3, 1])[0]
    num_rows = rng.choice([1, 2, rng.randint(3, 8), rng.randint(9, 40), rng.randint(9, 40)])
    batch_size = rng.choice([1, 2, 3, 4, 8])
    may_have_threads = door == SWIFT and rng.random() < 0.4
    draws = [None, "sample_rng"] if may_have_threads else [None, *GLOBAL_DRAWS]
    if not may_have_threads and door != TORCHS:
        draws += ["sample_rng", "all"]
    rows = range(num_rows)
    transform = None
    if rng.random() < 0.85:
        failing = frozenset(rng.sample(rows, 1)) if rng.random() < 0.15 else frozenset[int]()
        slow = frozenset(rng.sample(rows, min(num_rows, rng.choice([0, 0, 2]))))
        transform = Transform(rng.choice(draws), rng.random() < 0.5, failing, slow)
    retries = rng.choice([0, 1, 2, 2])
    failing_rows: dict[int, int] = {}
    if rng.random() < 0.6:
        failing_rows |= {row: rng.randint(0, retries) for row in rng.sample(rows, min(num_rows, rng.randint(0, 6)))}
    if rng.random() < 0.35:
        failing_rows |= dict.fromkeys(rng.sample(rows, min(num_rows, rng.choice([1, 1, 2, 5]))), ALWAYS)
    on_error = rng.choice({SWIFT: ["raise", "skip", "replace"], OURS: ["raise", "skip"], TORCHS: ["raise"]}[door])
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": rng.random() < 0.7, "drop_last": rng.random() < 0.2}
    if door != TORCHS:
        options["on_error"] = on_error
    nested = rng.choice(NESTED if door == SWIFT else NESTED[:-1])
    if door == SWIFT and nested == "Mixture":
        options["shuffle"] = True
    num_batches = max(1, num_rows // batch_size)
    num_legs = 1 if door == TORCHS else rng.choice([1, 1, 2, 3])
    legs = []
    for number in range(num_legs):
        threads = may_have_threads and (not processes or rng.random() < 0.5)
        workers = rng.choice([1, 2, 3]) if threads or (processes and (not number or rng.random() < 0.7)) else 0
        leg_options: dict[str, Any] = {}
        if door == SWIFT:
            leg_options = {"data_queue_size": rng.choice([3, 10, 20]), "validate": rng.random() < 0.5}
            leg_options["dataset_per_worker"] = rng.random() < 0.2
            if rng.random() < 0.3:
                leg_options["multithread"] = False
        elif workers and door == OURS:
            leg_options["persistent_workers"] = rng.random() < 0.5
        if workers and door != SWIFT and rng.random() < 0.5:
            leg_options["prefetch_factor"] = rng.choice([1, 2, 5])
        passes = []
        for _ in range(rng.choice([1, 2]) if door == SWIFT else 1):
            breaks_at = rng.randint(1, num_batches) if number + 1 < num_legs or rng.random() < 0.3 else None
            back = None
            if breaks_at and door != TORCHS and rng.random() < 0.25:
                back = rng.randint(0, breaks_at)
            kills = []
            if workers and not threads and door != TORCHS and rng.random() < 0.5:
                kills = [rng.randint(0, num_batches) for _ in range(rng.choice([1, 1, 2]))]
            passes.append(Pass(breaks_at, back, tuple(kills)))
        if passes[-1].goes_back_to is not None and rng.random() < 0.7:
            passes.append(Pass())
        start_method = "spawn" if rng.random() < 0.03 else "template"
        reads = rng.choice([None, 1, 3, 16])
        legs.append(Leg(workers, threads, reads, retries, leg_options, tuple(passes), start_method))
    return Case(
        seed,
        door,
        rng.choice(sorted(KINDS)),
        nested,
        num_rows,
        options,
        failing_rows,
        frozenset(rng.sample(rows, min(num_rows, rng.choice([0, 0, 1, 3])))),
        transform,
        tuple(legs),
    )


# What should come -----------------------------------------------------------------------------------------------------

Outcome = tuple[Any, ...]
"""What `next` gives: the bytes of a batch; or which error."""


def _outcome_of(batch: Any) -> Outcome:
    return tuple((name, np.asarray(batch[name]).tobytes()) for name in sorted(batch))


def _outcome_of_error(error: Exception) -> Outcome:
    """Return it for an error that was due. Others are raised again."""
    if isinstance(error, TooManyErrors):
        return (TooManyErrors.__name__,)
    if not isinstance(error, (ReadFailed, TransformFailed)):
        raise error
    found = re.search(r"row \d+ of \w+", str(error))
    assert found is not None, error
    return type(error).__name__, found.group()


def outcomes(loader: Any, look_at: Callable[[Exception], None] | None = None) -> Iterator[Outcome]:
    """Yield what comes of an epoch."""
    iterator = iter(loader)
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            outcome = _outcome_of_error(error)
            if look_at is not None:
                look_at(error)
        else:
            outcome = _outcome_of(batch)
        yield outcome
        if isinstance(loader, SwiftLoader) and _is_error(outcome):  # it would come again, and again
            return


def _is_error(outcome: Outcome) -> bool:
    return isinstance(outcome[0], str)


class Run:
    """A case under way."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self._folder, self._rng = case, folder, Random(case.seed)
        self._num_kills = 0

    def run(self) -> None:
        """Make all legs. Fails if anything comes that isn't due.

        A batch at which two workers are killed is given up.
        """
        try:
            self._run()
        except WorkerDied:
            if self._num_kills < 2:
                raise

    def _run(self) -> None:
        case = self.case
        loader = self._loader(None)
        with _closing(loader):
            self._epochs = [self._due(loader, epoch) for epoch in range(1 if case.door == TORCHS else NUM_EPOCHS)]
        state, position = None, (0, 0)
        for leg in case.legs:
            loader = self._loader(leg)
            with _closing(loader):
                if state is not None:
                    loader.load_state_dict(state)
                for number, one in enumerate(leg.passes):
                    position = self._pass(loader, leg, one, position)
                    if case.door == OURS and position[0] and not position[1] and one.goes_back_to is not None:
                        return  # what is left of the epoch, which is nothing, would come next
                    if one.goes_back_to is None and number + 1 < len(leg.passes):
                        position = position[0] + 1, 0
                if case.door != TORCHS:
                    state = loader.state_dict()
                if position[1] == len(self._epochs[position[0]]):
                    position = position[0] + 1, 0
                if case.door == OURS and position[1] == 0:
                    return  # the next order comes from torch's generator, which this case has used, too

    def _due(self, loader: Any, epoch: int) -> list[Outcome]:
        if self.case.door == SWIFT:
            loader.set_epoch(epoch)
        return list(outcomes(loader))

    def _pass(self, loader: Any, leg: Leg, one: Pass, position: tuple[int, int]) -> tuple[int, int]:
        """Return the epoch, and how many of its batches are through."""
        epoch, begin = position
        due, where = self._epochs[epoch], f"{self.case}\n{leg}\nepoch {epoch}, from batch {begin} on"
        number, states = begin, {0: loader.state_dict()} if one.goes_back_to is not None else {}
        if self.case.door == SWIFT and begin == 0:
            loader.set_epoch(epoch)  # after an error at its first batch, the epoch before would begin again
        found = outcomes(loader, lambda error: self._look_at(error, leg))
        while one.breaks_at is None or number - begin < one.breaks_at:
            if number - begin in one.kills:
                self._kill()
            outcome = next(found, None)
            if outcome is None:
                assert number == len(due), f"{where}: {number - begin} batches instead of {len(due) - begin}"
                break
            assert number < len(due), f"{where}: too many batches: {outcome}"
            assert outcome == due[number], f"{where}: batch {number} is another one:\n{outcome}\n{due[number]}"
            number += 1
            if self.case.door == SWIFT and _is_error(outcome):
                number -= 1
                break
            if one.goes_back_to is not None:
                states[number - begin] = loader.state_dict()
        if one.goes_back_to is not None:
            back = min(one.goes_back_to, max(states))
            loader.load_state_dict(states[back])
            number = begin + back
            if number == len(due):
                return epoch + 1, 0
        return epoch, number

    def _look_at(self, error: Exception, leg: Leg) -> None:
        """Check that the attempts are told of a sample that couldn't be read."""
        if not isinstance(error, ReadFailed):
            return
        told = "\n".join([str(error), *getattr(error, "__notes__", ())])
        found = re.search(r"row (\d+) of (\w+)", str(error))
        assert found is not None
        if self.case.nested == "ConcatDataset with a plain one" and found.group(2) == "plain":
            return
        listed = re.findall(r"(\d+) attempts? to read index (\d+)", told)
        if not listed and self.case.door == TORCHS:
            return
        assert listed, f"{self.case}: no attempts in {told!r}"
        number, row = listed[-1]  # before it, torch tells of the call that read several rows
        assert row == found.group(1), told
        assert leg.retries + 1 <= int(number) <= 2 * leg.retries + 2, told

    def _kill(self) -> None:
        victims: list[psutil.Process] = []
        for child in loader_children():
            with suppress(psutil.NoSuchProcess):
                victims += child.children() or [child]
        if victims:
            self._num_kills += 1
            with suppress(psutil.NoSuchProcess):
                self._rng.choice(victims).send_signal(signal.SIGKILL)

    # Loaders ----------------------------------------------------------------------------------------------------------

    def _loader(self, leg: Leg | None) -> Any:
        """Return that of a leg; None: the plain one."""
        case = self.case
        dataset, options = self._dataset(leg), dict(case.options)
        workers = 0 if leg is None else leg.workers
        if leg is not None:
            options |= leg.options
        if case.door == SWIFT:
            if leg is not None:
                options["worker_type"] = "thread" if leg.threads else "process"
                options["start_method"] = leg.start_method
                if leg.threads:
                    options.pop("dataset_per_worker")
            options |= {"worker_restarts": 100, "timeout": 30.0}
            if not options["shuffle"]:
                options.pop("nearby_shuffle", None)
            return SwiftLoader(dataset=dataset, seed=case.seed, worker_per_consumer=workers, **options)
        import torch

        torch.manual_seed(case.seed)
        random.seed(case.seed)
        np.random.seed(case.seed)
        if case.door == OURS:
            if workers:
                options |= {"worker_restarts": 100, "multiprocessing_context": "fork"}
            return DataLoader(dataset, num_workers=workers, seed=case.seed, **options)
        # torch's workers have their own seeds, so what is due has as many.
        workers = case.legs[0].workers
        return torch.utils.data.DataLoader(
            dataset,
            num_workers=workers,
            generator=torch.Generator().manual_seed(case.seed),
            multiprocessing_context="fork" if workers else None,
            **options,
        )

    def _dataset(self, leg: Leg | None) -> Any:
        from torch.utils.data import ConcatDataset, Subset

        case = self.case
        half = case.num_rows // 2
        match case.nested:
            case "Subset" if leg is None:  # torch's has `__getitems__`, so draws would be keyed by the batch
                return Chosen(self._part(leg, "whole", case.num_rows), self._order(case.num_rows))
            case "Subset":
                return Subset(self._part(leg, "whole", case.num_rows), self._order(case.num_rows))
            case "ConcatDataset":
                return ConcatDataset([self._part(leg, "one", half), self._part(leg, "another", case.num_rows - half)])
            case "ConcatDataset with a plain one":
                return ConcatDataset([self._part(None, "plain", half), self._part(leg, "one", case.num_rows - half)])
            case "Subset of a ConcatDataset":
                both: Any = ConcatDataset([self._part(leg, "one", half), self._part(leg, "two", case.num_rows - half)])
                return (Chosen if leg is None else Subset)(both, self._order(case.num_rows))
            case "Mixture" if case.num_rows > 1:
                parts = {"one": self._part(leg, "one", half), "two": self._part(leg, "two", case.num_rows - half)}
                return Mixture(parts, {"one": 0.3, "two": 0.7}, epoch_size=case.num_rows)
        return self._part(leg, "whole", case.num_rows)

    def _order(self, num_rows: int) -> list[int]:
        return Random(self.case.seed).sample(range(num_rows), num_rows)

    def _part(self, leg: Leg | None, name: str, num_rows: int) -> Any:
        case = self.case
        failing = {row: number for row, number in case.failing.items() if row < num_rows}
        source = KINDS[case.kind](name, num_rows, str(self._folder), failing, case.slow)
        if leg is None:
            return Plain(source, case.transform)
        return mapped(source, case.transform, reads=leg.reads, retries=leg.retries)


@contextmanager
def _closing(loader: Any) -> Iterator[None]:
    """Close a loader in the end, and look at how long that takes. torch's has nothing to close it with."""
    try:
        yield
    finally:
        began_s = time.monotonic()
        if hasattr(loader, "close"):
            loader.close()
        assert time.monotonic() - began_s < CLOSE_S, "close took long"
