"""What holds for every public way to load, whatever is inside: interrupts, threads, `close`, garbage, forks."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from torch.utils.data import IterableDataset

from swift_loader import DataLoader, LoaderClosed, SwiftLoader, WorkerDied
from swift_loader.pipeline import Pipeline, StageLoader
from tests.support.fronts import FRONTS, INTERRUPTED, NUM_BATCHES, Front, Numbers, number_of, pid_of
from tests.support.helpers import run_script, slow, wait_until
from tests.support.interrupting import NEVER, Interrupt, Points, call

all_fronts = pytest.mark.parametrize("front", FRONTS, ids=str)


class Alarm(Exception):
    """What a handler of the user's may raise: an ordinary exception."""


# An interrupt ---------------------------------------------------------------------------------------------------------


def go_through(front: Front, loader: Any, position: int, at: int, *, resumes: bool = False) -> int:
    """Interrupt the `next` after `position` batches at a point. The loop then gets the rest. Return the points.

    `resumes`: another loader gets the rest, too, from the state after the interrupt.
    """
    kind: type[BaseException] = Alarm if at % 2 else Interrupt
    iterator, points, got = iter(loader), Points(at), list[int]()
    got += [number_of(next(iterator)) for _ in range(position)]
    for _ in range(2 if at % 3 == 1 else 1):  # the second time, what the first one has made necessary
        try:
            got.append(number_of(call(iterator.__next__, points, kind)))
        except kind:
            assert points.has_raised
        except StopIteration:
            assert len(got) == NUM_BATCHES, "the end comes at the end"
        points, num_points = Points(at), points.count
    where = f"interrupted at point {at} of batch {position}"
    if resumes:
        other = front.make()
        other.load_state_dict(loader.state_dict())
        rest = iter(other)
        assert got + [number_of(batch) for batch in rest] == [*front.planned], f"the state is wrong, {where}"
        other.close()
    got += [number_of(batch) for batch in iterator]
    assert (got if front.in_order else sorted(got)) == [*front.planned], f"{got} {where}"
    with pytest.raises(StopIteration):
        next(iterator)
    return num_points


def go_through_all(front: Front, position: int, choose: Callable[[int], range]) -> None:
    """Interrupt one pass after the other, at each of the points chosen from so many. Report all that went wrong."""
    loader, wrong = front.make(), list[str]()
    num_points = go_through(front, loader, position, NEVER)
    for number, at in enumerate(choose(num_points)):
        try:
            go_through(
                front,
                loader,
                position,
                at,
                resumes=front.in_order and position == 3 and (number < 7 or not front.has_processes),
            )
        except BaseException as error:
            wrong.append(f"point {at} of {num_points} in batch {position}: {type(error).__name__}: {error}")
            loader.close()
            loader = front.make()
    loader.close()
    assert not wrong, "\n".join(wrong)


PROGRAM = """
import sys
from tests.support.fronts import INTERRUPTED, NUM_BATCHES
from tests.system.test_guards import go_through_all
sys.unraisablehook = lambda unraisable: None  # what a handler raises in a finaliser
(front,) = (front for front in INTERRUPTED if front.name == sys.argv[1])
num_points = int(sys.argv[2])
for position in (0, 3, NUM_BATCHES):
    go_through_all(front, position, lambda count: range(count // num_points // 2, count, -(-count // num_points)))
"""
"""A program of its own, because an interrupt between opening a descriptor and keeping it leaves that open."""


@pytest.mark.parametrize("front", [*INTERRUPTED[:2], *map(slow, INTERRUPTED[2:])], ids=str)
def test_after_an_interrupt_of_next_the_loop_goes_on_with_the_batch_that_it_has_not_got(
    front: Front, tmp_path: Path
) -> None:
    run_script(PROGRAM, front.name, "7", via="-c", folder=tmp_path)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("front", INTERRUPTED, ids=str)
def test_after_an_interrupt_at_any_point_of_next_the_loop_goes_on(front: Front, tmp_path: Path) -> None:
    run_script(PROGRAM, front.name, "1000000", via="-c", folder=tmp_path, timeout_s=3600)


# Threads --------------------------------------------------------------------------------------------------------------


@all_fronts
def test_two_threads_in_next_get_each_batch_once(front: Front) -> None:
    loader, errors = front.make(), list[BaseException]()
    for _ in range(4):
        iterator, got, barrier = iter(loader), list[list[int]](), threading.Barrier(2)

        def take_all(iterator: Any = iterator, got: list[list[int]] = got, barrier: Any = barrier) -> None:
            mine: list[int] = []
            got.append(mine)
            sys.settrace(switching)
            try:
                barrier.wait()
                mine.extend(map(number_of, iterator))
            except BaseException as error:
                errors.append(error)
            finally:
                sys.settrace(None)

        threads = [threading.Thread(target=take_all) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert sorted(got[0] + got[1]) == list(range(NUM_BATCHES))
        for mine in got:  # each thread gets its batches in order
            places = [front.planned.index(number) for number in mine]
            assert places == sorted(places)
    loader.close()


def switching(frame: Any, event: str, argument: Any) -> Any:
    """Let another thread run at each line."""
    os.sched_yield()
    return switching


# Closing --------------------------------------------------------------------------------------------------------------

SIX: Any = range(6)


class Six(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(SIX)


CLOSED: list[Callable[[], Any]] = [
    lambda: SwiftLoader(dataset=SIX, worker_per_consumer=0, shuffle=False, collate_fn=lambda samples: samples[0]),
    lambda: Pipeline(SIX).map(abs, concurrency=2),
    lambda: StageLoader(SIX, preprocessor=abs, output_order="input"),
    lambda: DataLoader(SIX),
    lambda: DataLoader(SIX, device="cpu"),
    lambda: DataLoader(Six()),
    lambda: DataLoader(SIX, num_workers=2, worker_type="thread"),
    lambda: DataLoader(SIX, num_workers=2),
    lambda: DataLoader(SIX, num_workers=2, persistent_workers=True),
    lambda: DataLoader(Six(), num_workers=2, shard_stream=True),
]


@pytest.mark.parametrize("make", CLOSED)
def test_close_ends_all_iterators_and_only_a_data_loader_begins_again(make: Callable[[], Any]) -> None:
    with make() as loader:
        has_one = isinstance(loader, SwiftLoader) or getattr(loader, "persistent_workers", False)
        begins_again = isinstance(loader, DataLoader)
        assert [int(batch) for batch in loader] == [0, 1, 2, 3, 4, 5]
        iterators = [iter(loader) for _ in range(1 if has_one else 2)]
        assert {int(next(iterator)) for iterator in iterators} == {0}
        state = loader.state_dict()
        loader.close()
        loader.close()
        for iterator in iterators * 2:
            with pytest.raises(LoaderClosed, match="closed; iterate over it again" if begins_again else "; make a new"):
                next(iterator)
        assert loader.state_dict() == state
        wait_until(lambda: all("root" in thread.name for thread in threads_of_loaders()), "the threads have ended")
        if begins_again:
            assert [int(batch) for batch in loader] == [0, 1, 2, 3, 4, 5]
            return
        for use in (lambda: next(iter(loader)), lambda: loader.load_state_dict(state)):
            with pytest.raises(LoaderClosed):
                use()


# Stuck and failed workers ---------------------------------------------------------------------------------------------


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def threads_of_loaders() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("swift_loader")}


def start_root(front: Front) -> tuple[set[psutil.Process], set[threading.Thread]]:
    """Have the process's root start, and return what stays of a loader."""
    loader = front.make()
    iterator = iter(loader)
    next(iterator)
    loader.close()
    del loader, iterator
    gc.collect()
    return children(), threads_of_loaders()


def wait_until_only(processes: set[psutil.Process], threads: set[threading.Thread]) -> None:
    wait_until(lambda: {one for one in children() - processes if is_alive(one)} == set(), "the processes have ended")
    wait_until(lambda: threads_of_loaders() <= threads, "the threads have ended")


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


with_processes = pytest.mark.parametrize("front", [front for front in FRONTS if front.has_processes], ids=str)


@with_processes
@pytest.mark.parametrize("how", ["ignores all signals", "is stopped"])
def test_close_leaves_no_stuck_worker(front: Front, how: str, tmp_path: Path) -> None:
    before = start_root(front)
    hangs = how == "ignores all signals"
    loader = front.make(deeds=dict.fromkeys(front.planned[7:], "hang") if hangs else {}, marker=str(tmp_path))
    iterator = iter(loader)
    pids = {pid_of(next(iterator)) for _ in range(6)}
    if hangs:
        wait_until(lambda: any(tmp_path.iterdir()), "a worker hangs")
    else:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    loader.close()
    del loader, iterator
    wait_until_only(*before)


@all_fronts
@pytest.mark.filterwarnings("ignore:process . of 2 of stage:swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize("deed", ["die", "raise"])
def test_a_failed_loader_that_is_dropped_leaves_nothing(front: Front, deed: str) -> None:
    if deed == "die" and not front.has_processes:
        pytest.skip("its workers are threads")
    before = start_root(front)

    def fail() -> weakref.ref[Any]:
        loader = front.make(deeds={front.planned[7]: deed})
        iterator = iter(loader)
        with pytest.raises(WorkerDied if deed == "die" else ValueError) as raised:
            list(iterator)
        assert raised.value.__traceback__ is not None
        return weakref.ref(loader)

    dropped = fail()
    gc.collect()
    assert dropped() is None
    wait_until_only(*before)


# Forks ----------------------------------------------------------------------------------------------------------------


def num_mapped() -> int:
    """Return how many segments of loaders this process has mapped."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:swift_loader" in line for line in maps)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@with_processes
def test_forks_of_another_loader_change_no_kept_batch_and_leak_no_memory(front: Front) -> None:
    gc.collect()
    before = num_mapped()
    loader, kept, most = front.make(size=20_000), dict[int, Any](), 0
    for epoch in range(6):
        for number, batch in zip(front.planned, loader, strict=True):
            assert number_of(batch) == number
            if number % 8 == epoch:
                kept[number] = batch
            if number == front.planned[9]:  # in the middle of the epoch, with batches in flight
                numbers: Any = Numbers(20_000)
                validation: Any = DataLoader(numbers, batch_size=10, num_workers=1, multiprocessing_context="fork")
                assert sum(len(batch) for batch in validation) == NUM_BATCHES
                del validation
            most = max(most, num_mapped() - before)
        assert [number_of(batch) for batch in kept.values()] == list(kept)
    del batch
    assert most < 60
    iterator = iter(loader)
    next(iterator)
    loader.close()
    assert [number_of(batch) for batch in kept.values()] == list(kept)
    kept.clear()
    del iterator, loader
    gc.collect()
    wait_until(lambda: num_mapped() <= before, "nothing is mapped any more")


# Cost -----------------------------------------------------------------------------------------------------------------

MOST_CALLS = {
    "SwiftLoader": 43,
    "DataLoader": 55,
    "DataLoader to a device": 110,
    "DataLoader of a stream": 58,
    "Pipeline in processes": 90,
    "StageLoader": 55,
}
"""A tenth more than was measured. A `next` that has to wait makes more calls, so a quarter of all count."""


@all_fronts
def test_a_ready_batch_costs_few_calls(front: Front) -> None:
    loader, counts = front.make(), list[int]()
    for _ in range(10):
        iterator = iter(loader)
        for _ in range(NUM_BATCHES):
            counts.append(num_calls_of(iterator.__next__))
            np.ones(100_000).cumsum()  # the loop's work, while batches get ready
    loader.close()
    assert sorted(counts)[len(counts) // 4] <= MOST_CALLS[front.name]


def num_calls_of(step: Callable[[], Any]) -> int:
    """Return how many functions written in Python a call calls on this thread."""
    num_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return num_calls
