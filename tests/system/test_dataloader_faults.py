"""The drop-in DataLoader when something goes wrong: the same batches as without, or an error of torch's type."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from swift_loader import DataLoader, SwiftLoader, WorkerDied, WorkerStalled
from tests.support.helpers import (
    LIKE_A_FORK,
    going_on_when_told,
    is_true_in_a_fork,
    loader_processes,
    wait_until,
)
from tests.support.resumable import ShareIterator

NUM_SAMPLES = 41


class OwnError(Exception):
    """The user's."""


class Faulty:
    """The numbers 0 to 40. At some of them, something goes wrong: once, if there is a file to note that."""

    def __init__(self, at: int, fault: Callable[[], object], folder: Path | None = None) -> None:
        self.at, self.fault = at, fault
        self.note = None if folder is None else folder / "done"

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        if index == self.at and self._is_due():
            self.fault()
        return index

    def _is_due(self) -> bool:
        if self.note is None:
            return True
        is_due = not self.note.exists()
        self.note.touch()
        return is_due


class FaultyStream(IterableDataset[int]):
    """The same numbers, shared out over the workers. `with_state`: its iterators have a state."""

    def __init__(self, faulty: Faulty, *, with_state: bool) -> None:
        self.faulty, self.with_state = faulty, with_state

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        share = range(NUM_SAMPLES) if info is None else range(info.id, NUM_SAMPLES, info.num_workers)
        return _Shard(self.faulty, share) if self.with_state else (self.faulty[index] for index in share)


class _Shard(ShareIterator):
    def __init__(self, faulty: Faulty, share: range) -> None:
        super().__init__(share)
        self.faulty = faulty

    def __next__(self) -> int:
        return self.faulty[super().__next__()]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(0)


def fail() -> None:
    raise OwnError("from the user's code")


def end_early() -> None:
    raise StopIteration


def hang() -> None:
    signal.pause()


def numbers(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch]


def make(dataset: Any, **options: Any) -> DataLoader[Any]:
    options.setdefault("num_workers", 2)
    own = LIKE_A_FORK if options["num_workers"] else {}
    return DataLoader(dataset, **{"batch_size": 4, **own, **options})


KINDS = ["index", "stream", "stream with state"]
in_processes_and_threads = pytest.mark.parametrize("worker_type", ["process", "thread"])


def dataset_of(kind: str, faulty: Faulty) -> Any:
    return FaultyStream(faulty, with_state="state" in kind) if "stream" in kind else faulty


def worker_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("swift_loader-worker")}


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize("fault", [kill, leave])
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_dies_is_replaced_and_the_batches_are_the_same(
    kind: str, fault: Callable[[], object], tmp_path: Path
) -> None:
    whole = numbers(make(dataset_of(kind, Faulty(-1, fault))))
    assert sorted(whole) == list(range(NUM_SAMPLES))
    assert numbers(make(dataset_of(kind, Faulty(18, fault, tmp_path)))) == whole


def _kill_one() -> None:
    """Kill the youngest process, which has no children: a worker."""
    for child in sorted(loader_processes(), key=lambda one: one.pid, reverse=True):
        with suppress(psutil.NoSuchProcess):
            if not child.children():
                child.kill()
                return


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_past_the_budget_the_error_is_a_runtime_error(kind: str) -> None:
    loader = make(dataset_of(kind, Faulty(18, kill)))
    with pytest.raises(RuntimeError) as caught:
        numbers(loader)
    assert isinstance(caught.value, WorkerDied)


def test_without_restarts_the_first_death_is_the_error() -> None:
    told = r"(?s)^DataLoader worker \(pid \d+\) is killed by signal: Killed: .*With worker_restarts=0, no"
    with pytest.raises(WorkerDied, match=told):
        numbers(make(Faulty(18, kill), worker_restarts=0))


def test_a_worker_that_hangs_is_told_after_the_time_that_the_user_says(tmp_path: Path) -> None:
    may_go_on = tmp_path / "may go on"
    dataset = Faulty(0, partial(wait_until, may_go_on.exists, "the warning"), tmp_path)
    with going_on_when_told("has been at batch 0 of epoch 0", may_go_on.touch) as told:
        assert numbers(make(dataset, stall_warning=0.2)) == list(range(NUM_SAMPLES))
    assert "in __getitem__" in told[0]
    assert numbers(make(Faulty(0, partial(time.sleep, 0.7)), stall_warning=None)) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_timeout_the_loop_may_wait_again(kind: str) -> None:
    iterator = iter(make(dataset_of(kind, Faulty(0, hang)), timeout=1))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="DataLoader timed out after 1 seconds") as caught:
            next(iterator)
        assert isinstance(caught.value, WorkerStalled)


class Held:
    """The numbers of the keys. The batch that begins with 0 waits until there is a file."""

    def __init__(self, may_go_on: Path) -> None:
        self.may_go_on = may_go_on

    def __getitems__(self, keys: list[Any]) -> list[int]:
        if int(keys[0]) == 0:
            wait_until(self.may_go_on.exists, "the end of the wait")
        return [int(key) for key in keys]


LONG = "0>4000"
FULL: dict[str, list[list[Any]]] = {
    "integers": [list(range(first, first + 4096)) for first in range(0, 32 * 4096, 4096)],
    # Each third batch is too long for one message of a pipe.
    "texts": [[format(batch, LONG) for _ in range(12 if batch % 3 else 20)] for batch in range(40)],
}
"""Batches of keys of which a pipe can't hold those that wait for one worker."""


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize(
    ("keys", "end"),
    [("integers", "none"), ("texts", "none"), ("texts", "killed"), ("integers", "stopped"), ("integers", "closed")],
)
def test_a_worker_that_reads_no_tasks_holds_up_nobody_but_its_batch(keys: str, end: str, tmp_path: Path) -> None:
    batches, may_go_on = FULL[keys], tmp_path / "may go on"
    loader = make(Held(may_go_on), batch_size=1, sampler=None, batch_sampler=batches, prefetch_factor=16, timeout=0.5)
    iterator = iter(loader)
    with pytest.raises(WorkerStalled, match="has been at batch 0 of epoch 0"):
        next(iterator)
    workers = iterator._workers  # type: ignore[attr-defined]
    # Until all workers have started, each gets only one task.
    wait_until(lambda: any(worker.channel.outbox for worker in workers), "tasks for which there is no room in the pipe")
    hung = max(workers, key=lambda worker: len(worker.channel.outbox))
    if end == "closed":
        iterator._shutdown_workers()  # type: ignore[attr-defined]
        return
    if end == "stopped":
        os.kill(hung.pid, signal.SIGSTOP)
        with pytest.raises(WorkerStalled):
            next(iterator)
        os.kill(hung.pid, signal.SIGCONT)
    may_go_on.touch()
    if end == "killed":
        hung.kill()
    got: list[int] = []
    while (batch := next_after_stalls(iterator)) is not None:
        got += batch.tolist()
    assert got == [int(key) for batch in batches for key in batch]


def next_after_stalls(iterator: Iterator[Any]) -> Any:
    while True:
        with suppress(WorkerStalled):  # the machine is busy
            return next(iterator, None)


WHERE: dict[str, dict[str, Any]] = {"none": {"num_workers": 0}, "process": {}, "thread": {"worker_type": "thread"}}


@pytest.mark.parametrize("at", ["sample", "collate"])
@pytest.mark.parametrize("workers", WHERE)
def test_the_loop_goes_on_after_an_error_of_the_user(workers: str, at: str) -> None:
    def collate(samples: list[int]) -> Any:
        return torch.tensor(samples) if at == "sample" or 9 not in samples else fail()

    options: dict[str, Any] = {"collate_fn": collate, **WHERE[workers]}
    iterator = iter(make(Faulty(9 if at == "sample" else -1, fail), **options))
    found = [next(iterator), next(iterator)]
    with pytest.raises(OwnError, match="from the user's code"):
        next(iterator)
    assert numbers(found + list(iterator)) == [n for n in range(NUM_SAMPLES) if n not in range(8, 12)]


class FailsOnce:
    """Batches of one index. In place of batch 2, there is an error."""

    def __init__(self) -> None:
        self._left = iter(range(NUM_SAMPLES))

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        if (index := next(self._left)) == 2:
            fail()
        return [index]


@pytest.mark.parametrize("workers", WHERE)
def test_a_sampler_is_asked_again_after_its_error(workers: str) -> None:
    iterator = iter(make(range(NUM_SAMPLES), batch_size=1, batch_sampler=FailsOnce(), **WHERE[workers]))
    found = [next(iterator), next(iterator)]
    with pytest.raises(OwnError, match="from the user's code"):
        next(iterator)
    assert numbers(found + list(iterator)) == [n for n in range(NUM_SAMPLES) if n != 2]


class Frozen(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


class Mute(Exception):
    def __str__(self) -> str:
        raise AttributeError("no text")


ODD: list[Callable[[], Exception]] = [
    lambda: Frozen("as it is"),
    lambda: Mute("odd"),
    lambda: KeyError(torch.tensor(3)),
    lambda: ValueError("bad", torch.ones(20_000)),
]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("make_error", ODD, ids=["frozen", "mute", "key", "tensor"])
def test_an_odd_exception_of_the_user_arrives_as_one(make_error: Callable[[], Exception], num_workers: int) -> None:
    def fault() -> None:
        raise make_error()

    with pytest.raises(type(make_error())) as caught:
        list(make(Faulty(0, fault), num_workers=num_workers))
    if type(caught.value) is KeyError:
        assert "tensor(3)" in str(caught.value)
    planned = SwiftLoader(Faulty, {"at": 0, "fault": fault}, worker_per_consumer=0)
    with pytest.raises(type(make_error())):
        list(planned)


def test_a_stream_whose_iterator_fails_is_over_where_that_is_a_generator() -> None:
    iterator = iter(make(dataset_of("stream", Faulty(9, fail)), num_workers=1))
    found = [next(iterator), next(iterator)]
    with pytest.raises(OwnError):
        next(iterator)
    assert numbers(found + list(iterator)) == list(range(8))


@in_processes_and_threads
def test_stop_iteration_from_a_map_style_dataset_never_ends_the_loop_early(worker_type: str) -> None:
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        numbers(make(Faulty(9, end_early), worker_type=worker_type))


def test_an_error_of_worker_init_fn_comes_from_next() -> None:
    def init(worker_id: int) -> None:
        raise OwnError(f"in worker {worker_id}")

    with pytest.raises(OwnError, match="in worker"):
        next(iter(make(Faulty(-1, fail), worker_init_fn=init)))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_an_empty_dataset_gives_no_batches(num_workers: int) -> None:
    for _ in range(2):
        assert list(make([], num_workers=num_workers)) == []


def test_an_iterator_outlives_its_loader() -> None:
    iterator = iter(make(Faulty(-1, fail)))
    found = [next(iterator)]
    assert numbers(found + list(iterator)) == list(range(NUM_SAMPLES))


@in_processes_and_threads
def test_dropped_iterators_leave_no_workers(worker_type: str) -> None:
    loader = make(Faulty(-1, fail), worker_type=worker_type)
    for _ in range(3):
        next(iter(loader))
    del loader
    wait_until(lambda: not loader_processes() and not worker_threads(), "the end of all workers")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the program")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@in_processes_and_threads
def test_a_fork_of_the_trainer_makes_its_own_workers(worker_type: str) -> None:
    loader = make(Faulty(-1, fail), persistent_workers=True, worker_type=worker_type)
    iterator = iter(loader)
    found = [next(iterator)]
    assert is_true_in_a_fork(lambda: numbers(loader) == list(range(NUM_SAMPLES)))
    assert numbers(found + list(iterator)) == list(range(NUM_SAMPLES))
