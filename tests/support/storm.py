"""Does everything to loaders at once, at random, and looks at every byte that arrives. test_storm.py runs cases.

All of a case is drawn from its seed before anything runs, so the same seed is the same case again.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil
import pytest

from swift_loader import ProtocolError, SwiftLoader, SwiftLoaderError, WorkerDied, WorkerStalled
from tests.support.helpers import loader_children, without_root
from tests.support.storm_datasets import (
    CONTENT,
    FOLDER_OF_NAMES,
    KEYS,
    READS,
    RECORD_NBYTES,
    SALT,
    Stormy,
    StormyInBulk,
    as_list,
)

NUM_EPOCHS = 8
"""Epochs of any case are below."""

_NUM_MORE_NAMES = 7
_STOPPED_S, _IDLE_S = 0.1, 0.05


class Deed(Enum):
    """What happens between two batches."""

    KILL = "a worker is killed"
    KILL_TEMPLATE = "the template is killed"
    STOP = "a worker is stopped, and goes on"
    CHDIR = "the trainer changes the directory, to one with other files of the same names"
    ENVIRON = "the trainer changes its environment"
    FORK = "the trainer forks; the child keeps batches"
    GROW = "the dataset's folder gets more files"
    REPLACE = "the dataset's file is replaced by another one"
    IDLE = "the loop takes its time"


_CHANGES = {Deed.CHDIR, Deed.ENVIRON, Deed.GROW, Deed.REPLACE}
"""Of what a dataset depends on: before the loader starts, they are none."""

_WEIGHTS = {
    Deed.KILL: 6.0,
    Deed.KILL_TEMPLATE: 2.0,
    Deed.STOP: 0.7,
    Deed.CHDIR: 2.0,
    Deed.ENVIRON: 2.0,
    Deed.FORK: 3.0,
    Deed.IDLE: 3.0,
}

_PROVOKED_BY = {
    "arrays": (Deed.REPLACE, Deed.KILL_TEMPLATE),
    "kept open": (Deed.REPLACE, Deed.KILL),
    "relative": (Deed.CHDIR, Deed.KILL_TEMPLATE),
    "relative, opened late": (Deed.CHDIR, Deed.KILL_TEMPLATE),
    "changes directory": (Deed.CHDIR, Deed.KILL_TEMPLATE),
    "environment": (Deed.ENVIRON, Deed.KILL_TEMPLATE),
    "hashes": (Deed.KILL_TEMPLATE,),
    "unkeyed": (Deed.KILL_TEMPLATE,),
    "thread": (Deed.REPLACE, Deed.KILL),
    "opened late": (Deed.KILL,),
    "draws in constructor": (Deed.KILL_TEMPLATE,),
    "grows": (Deed.GROW, Deed.KILL, Deed.KILL_TEMPLATE),
}
"""What is likely to show that the workers of a kind differ, in this order."""

_INSTANCES = ("arrays", "augments")
"""Kinds of which an instance may be sent."""

_COMPARED_WITH_ITSELF = ("hashes", "unkeyed")
"""Another process builds another dataset, so only the workers of one loader can be held to agree."""


@dataclass(frozen=True)
class Pass:
    """One way through an epoch, or a part of it."""

    epoch: int | None = None
    """For `set_epoch`; None goes on to the next."""
    breaks_at: int | None = None
    """Batches after which the loop breaks."""
    events: tuple[tuple[int, Deed], ...] = ()
    """What happens before the batch with this number is asked for."""


@dataclass(frozen=True)
class Leg:
    """One loader of a case; the first goes on from nothing, each other one from the state of the one before."""

    options: dict[str, Any]
    slow_s: float
    """What each sample takes."""
    hoard: int
    """Batches, and parts of batches, that the loop keeps at most."""
    passes: tuple[Pass, ...]


@dataclass(frozen=True)
class Case:
    """All of it."""

    seed: int
    kind: str
    num_samples: int
    sizes: str
    in_bulk: bool
    as_instance: bool
    options: dict[str, Any]
    """Of all loaders."""
    legs: tuple[Leg, ...]


def draw_case(seed: int, kind: str | None = None) -> Case:
    """Return the case of a seed; with a kind, one of that kind."""
    rng = Random(seed)
    kind = kind or rng.choice(sorted(READS))
    num_samples = rng.choice([rng.choice([0, 1]), rng.randint(2, 7), *(rng.randint(8, 60), rng.randint(60, 150)) * 3])
    batch_size = rng.choice([1, 1, 2, 3, 4, 8, 16])
    sizes = "equal" if kind in _COMPARED_WITH_ITSELF else rng.choice(["equal", "equal", "ragged", "wild"])
    if sizes == "wild":
        batch_size = min(batch_size, 3)  # so that there are tiny batches among the others
    shuffle = rng.random() < 0.7
    return Case(
        seed,
        kind,
        num_samples,
        sizes,
        in_bulk=rng.random() < 0.2,
        as_instance=kind in _INSTANCES and rng.random() < 0.4,
        options={
            "batch_size": batch_size,
            "shuffle": shuffle,
            "nearby_shuffle": rng.choice([None, 0, 7]) if shuffle else None,
            "drop_last": rng.random() < 0.2,
        },
        legs=tuple(_draw_leg(rng, kind, num_samples // batch_size) for _ in range(rng.choice([1, 1, 2]))),
    )


def _draw_leg(rng: Random, kind: str, num_batches: int) -> Leg:
    in_order = rng.random() < 0.7
    passes = []
    for number in range(rng.randint(1, 3)):
        breaks_at = rng.randint(1, num_batches) if in_order and num_batches and rng.random() < 0.25 else None
        deeds = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=rng.choice([0, 0, 1, 2, 4]))
        if rng.random() < 0.4:
            place = rng.randint(0, len(deeds))
            deeds[place:place] = _PROVOKED_BY.get(kind, ())
        events = tuple(zip(sorted(rng.randint(0, num_batches) for _ in deeds), deeds, strict=True))
        passes.append(Pass(rng.randrange(2) if number and rng.random() < 0.2 else None, breaks_at, events))
    may_change = kind == "unkeyed" or any(deed in _CHANGES for one in passes for _, deed in one.events)
    options = {
        "worker_per_consumer": rng.choice([1, 2, 2, 3, 4]),
        "start_method": "spawn" if rng.random() < 0.15 else "template",
        "in_order": in_order,
        "multithread": rng.random() < 0.7,
        "data_queue_size": rng.choice([1, 2, 3, 10]),
        "dataset_per_worker": rng.random() < 0.2,
        "timeout": 20.0,
        "worker_restarts": 0 if rng.random() < 0.05 else rng.choice([3, 3, 100]),
        "validate": may_change or rng.random() < 0.8,
    }
    return Leg(options, rng.choice([0.0, 0.0, 0.002]), rng.choice([0, 3, 10, 400]), tuple(passes))


# What should come -----------------------------------------------------------------------------------------------------

Print = tuple[tuple[int, ...], tuple[bytes, ...]]
"""The ids of a batch's samples and their bytes. Two batches have the same only if they are equal."""


def print_of(batch: Any) -> Print:
    """Return what a batch consists of."""
    if isinstance(batch, dict):
        batch = [{"id": number, "data": data} for number, data in zip(batch["id"], batch["data"], strict=True)]
    return tuple(int(one["id"]) for one in batch), tuple(np.asarray(one["data"]).tobytes() for one in batch)


def loader_of(case: Case, folder: Path, slow_s: float = 0.0, **options: Any) -> SwiftLoader:
    dataset_class: Any = StormyInBulk if case.in_bulk else Stormy
    kwargs = {"kind": case.kind, "folder": str(folder), "num_samples": case.num_samples, "sizes": case.sizes}
    kwargs["slow_s"] = slow_s
    source: dict[str, Any] = {"dataset_class": dataset_class, "dataset_kwargs": kwargs}
    if case.as_instance:
        source = {"dataset": dataset_class(**kwargs)}
    collate_fn = None if case.sizes == "equal" else as_list
    return SwiftLoader(**source, seed=case.seed, collate_fn=collate_fn, **case.options, **options)


def make_reference(case: Case, folder: Path) -> list[list[Print]]:
    """Return the batches of the first epochs, as a loader without workers gives them."""
    with loader_of(case, folder, worker_per_consumer=0) as loader:
        return [list(map(print_of, loader)) for _ in range(NUM_EPOCHS)]


class Storm:
    """A case under way. The working directory and the environment are the test's to put back."""

    def __init__(self, case: Case, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.case, self.here, self.there, self._patch = case, folder / "here", folder / "there", patch
        self._rng = Random(case.seed)
        self._kept: list[tuple[Any, Print | bytes]] = []
        self._children: list[tuple[int, int]] = []
        """Forks that keep batches: the pid, and the descriptor that tells them to look at these and end."""
        self._seen: dict[int, bytes] = {}
        self._num_kills = 0
        self._has_changed = False

    def run(self) -> None:
        """Make all legs. Returns early if a leg ends in a typed error for which there was a reason."""
        for number, folder in enumerate((self.here, self.here / "inner", self.there, self.there / "inner")):
            folder.mkdir(parents=True)
            self._write(folder, number)
        (self.here / FOLDER_OF_NAMES).mkdir()
        without_root(self._patch)
        self._put_back()
        with get_context("fork").Pool(1) as pool:  # constructors leave things behind
            self._epochs = pool.apply(make_reference, (self.case, self.here))
        state, position = None, (0, 0)
        try:
            for leg in self.case.legs:
                self._put_back()
                self._seen, self._num_kills, self._has_changed = {}, 0, self.case.kind == "unkeyed"
                try:
                    state, position = self._run_leg(leg, state, position)
                except SwiftLoaderError as error:
                    if not self._is_justified(error, leg):
                        raise
                    return
        finally:
            self._end_children()

    def _is_justified(self, error: SwiftLoaderError, leg: Leg) -> bool:
        """Return whether the leg has done something that may end in this error."""
        num_survived = min(leg.options["worker_restarts"], 1)
        is_too_much = isinstance(error, (WorkerDied, WorkerStalled)) and self._num_kills > num_survived
        return not isinstance(error, ProtocolError) and (self._has_changed or is_too_much)

    def _run_leg(self, leg: Leg, state: Any, position: tuple[int, int]) -> tuple[Any, tuple[int, int]]:
        """Return the state at the end, and the (epoch, batch) that comes next."""
        with loader_of(self.case, self.here, leg.slow_s, **leg.options) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for one in leg.passes:
                position = self._run_pass(loader, leg, one, position)
                next_begin = (position[0] + 1, 0)
                is_over = position[1] == len(self._epochs[position[0]])
                state, reached = loader.state_dict(), next_begin if is_over else position
                position = next_begin
            assert loader.report().get("worker_restarts", 0) <= self._num_kills
        while self._kept:
            self._drop(0)
        return state, reached

    def _run_pass(self, loader: SwiftLoader, leg: Leg, one: Pass, position: tuple[int, int]) -> tuple[int, int]:
        """Return the epoch, and how many of its batches are through."""
        epoch, begin = position
        if one.epoch is not None:
            loader.set_epoch(one.epoch)
            epoch, begin = one.epoch, begin if one.epoch == epoch else 0
        due = self._epochs[epoch][begin:]
        where = f"{self.case}\nepoch {epoch}, from batch {begin} on"
        got: list[Print] = []
        iterator, batch = iter(loader), None
        while one.breaks_at is None or len(got) < one.breaks_at:
            for at, deed in one.events:
                if at == len(got) and (loader.has_started or deed not in _CHANGES):
                    self._carry_out(deed, batch)
            batch = None  # as `for batch in loader` would not: the batch before is let go
            batch = next(iterator, None)
            if batch is None:
                break
            got.append(self._looked_at(print_of(batch), where))
            assert got[-1][0] == tuple(loader.batch_indices.tolist()), where
            if leg.hoard and self._rng.random() < 0.8:
                part = self._part_of(batch)
                self._kept.append((part, _bytes_of(part)))
                while len(self._kept) > leg.hoard:
                    self._drop(self._rng.randrange(len(self._kept)))
        expected = [self._looked_at(print_, where, is_due=True) for print_ in due]
        if leg.options["in_order"]:
            assert got == expected[: len(got)], f"{where}: other batches"
        else:
            assert not Counter(got) - Counter(expected), f"{where}: a batch is another one, or comes twice"
        assert one.breaks_at is not None or len(got) == len(due), f"{where}: {len(got)} batches instead of {len(due)}"
        return epoch, begin + len(got)

    def _looked_at(self, print_: Print, where: str, *, is_due: bool = False) -> Print:
        """Return what is compared with the reference. Fail if a sample isn't what another worker made of it."""
        if self.case.kind not in _COMPARED_WITH_ITSELF:
            return print_
        if not is_due:
            for index, content in zip(*print_, strict=True):
                assert self._seen.setdefault(index % KEYS, content) == content, f"{where}: another sample {index}"
        return print_[0], ()

    # Batches that are kept, by the loop or by a fork of the trainer ---------------------------------------------------

    def _part_of(self, batch: Any) -> Any:
        part = batch
        while self._rng.random() < 0.5:
            if isinstance(part, dict):
                part = part["data"]
            elif (isinstance(part, list) or (isinstance(part, np.ndarray) and part.ndim)) and len(part):
                begin = self._rng.randrange(len(part))
                is_row = self._rng.random() < 0.5 and getattr(part, "ndim", 2) > 1  # a scalar would be a copy
                part = part[begin] if is_row else part[begin:]
            else:
                break
        return part

    def _drop(self, number: int) -> None:
        part, before = self._kept.pop(number)
        assert _bytes_of(part) == before, f"{self.case}: a batch changed while it was kept"

    def _fork(self, batch: Any) -> None:
        """Have a child keep what is kept here, and, for certain, the batch that comes next to be let go."""
        held = [*self._kept, *([(batch, _bytes_of(batch))] if batch is not None else [])]
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            with suppress(BaseException):
                os.close(write)
                os.read(read, 1)  # until the parent is through
                status = int(any(_bytes_of(part) != before for part, before in held))
            os._exit(status)
        os.close(read)
        self._children.append((pid, write))
        if self._rng.random() < 0.5:
            while self._kept:
                self._drop(0)

    def _end_children(self) -> None:
        children, self._children = self._children, []
        for _, write in children:
            os.close(write)
        statuses = [os.waitpid(pid, 0)[1] for pid, _ in children]
        assert not any(statuses), f"{self.case}: in a forked child, kept batches changed"

    # What happens in between ------------------------------------------------------------------------------------------

    def _carry_out(self, deed: Deed, batch: Any) -> None:
        self._has_changed |= deed in (Deed.GROW, Deed.REPLACE)
        match deed:
            case Deed.KILL | Deed.KILL_TEMPLATE | Deed.STOP:
                self._strike(deed)
            case Deed.CHDIR:
                self._patch.chdir(self.there)
            case Deed.ENVIRON:
                self._patch.setenv(SALT, "another")
            case Deed.FORK:
                self._fork(batch)
            case Deed.GROW:
                for number in range(_NUM_MORE_NAMES):
                    (self.here / FOLDER_OF_NAMES / f"new {number}").touch()
            case Deed.REPLACE:
                self._write(self.here, 4)
            case Deed.IDLE:
                time.sleep(self._rng.random() * _IDLE_S)

    def _strike(self, deed: Deed) -> None:
        """Kill or stop a process of the loader, if there is one; without templates, all are workers."""
        victims: list[psutil.Process] = []
        for child in loader_children():
            with suppress(psutil.NoSuchProcess):
                if child.pid not in {pid for pid, _ in self._children}:
                    workers = child.children()
                    victims += [child] if deed is Deed.KILL_TEMPLATE or not workers else workers
        if not victims:
            return
        self._num_kills += 1
        victim = self._rng.choice(victims)
        with suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGSTOP if deed is Deed.STOP else signal.SIGKILL)
            if deed is Deed.STOP:
                time.sleep(_STOPPED_S)
                victim.send_signal(signal.SIGCONT)

    # What datasets depend on ------------------------------------------------------------------------------------------

    def _put_back(self) -> None:
        """Make all as it is when a loader is made."""
        self._patch.chdir(self.here)
        self._patch.setenv(SALT, "as it was")
        self._write(self.here, 0)
        shutil.rmtree(self.here / FOLDER_OF_NAMES)
        (self.here / FOLDER_OF_NAMES).mkdir()
        for number in range(self.case.num_samples):
            (self.here / FOLDER_OF_NAMES / str(number)).touch()

    def _write(self, folder: Path, number: int) -> None:
        """Put another file in the place of the data; who has the old one open keeps it."""
        nbytes = (self.case.num_samples + _NUM_MORE_NAMES) * RECORD_NBYTES
        (folder / "new.bin").write_bytes(np.random.default_rng(number).bytes(nbytes))
        (folder / "new.bin").rename(folder / CONTENT)


def _bytes_of(part: Any) -> bytes:
    """Return what two parts of batches have in common only if their bytes are equal."""
    if isinstance(part, dict):
        return b"".join(_bytes_of(part[name]) for name in sorted(part))
    return b"".join(map(_bytes_of, part)) if isinstance(part, list) else np.asarray(part).tobytes()
