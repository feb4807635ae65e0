"""What holds for every public way to load, whatever is inside: interrupts, threads, `close`, garbage, forks."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from swift_loader import DataLoader, LoaderClosed, SwiftLoaderError, WorkerDied, WorkerStalled
from tests.support.fronts import FRONTS, GO_ON, INTERRUPTED, NUM_BATCHES, Front, Numbers, number_of, pid_of
from tests.support.helpers import exhaustive, is_true_in_a_fork, run_script, slow, wait_until
from tests.support.interrupting import NEVER, Interrupt, Points, call


def of(fronts: Iterable[Front], usual: Sequence[Front] = FRONTS) -> Any:
    """Parametrise a test by these fronts. Of those with processes, only the usual ones are quick."""
    cases = [slow(front) if front.has_processes and front not in usual else front for front in fronts]
    return pytest.mark.parametrize("front", cases, ids=str)


usual_fronts = pytest.mark.parametrize("front", FRONTS, ids=str)
all_fronts = of(INTERRUPTED)
FEW = {"SwiftLoader", "DataLoader", "DataLoader of a stream", "Pipeline in threads"}


class Alarm(Exception):
    """What a handler of the user's may raise: an ordinary exception."""


# An interrupt ---------------------------------------------------------------------------------------------------------


def go_through(front: Front, loader: Any, position: int, at: int, *, resumes: bool = False) -> int:
    """Interrupt the `next` after `position` batches at a point. The loop then gets the rest. Return the points.

    `resumes`: another loader gets the rest, too, from the state after the interrupt. Some handlers ask for a state.
    """
    asks = loader.state_dict if front.in_order and at % 3 else int
    kind: type[BaseException] = Alarm if at % 2 else Interrupt
    iterator, points, got = iter(loader), Points(at), list[int]()
    got += [number_of(next(iterator)) for _ in range(position)]
    for _ in range(2 if at % 3 == 1 else 1):  # the second time, what the first one has made necessary
        try:
            got.append(number_of(call(iterator.__next__, points, kind, asks)))
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


def go_through_all(front: Front, position: int, choose: Callable[[int], Iterable[int]]) -> None:
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
    go_through_all(
        front, position, lambda count: [*range(count // num_points // 2, count, -(-count // num_points)), count - 1]
    )
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


# The loop -------------------------------------------------------------------------------------------------------------


def numbers_of(front: Front, batches: Iterable[Any]) -> list[int]:
    """Return the numbers of the batches, in an order that the front promises."""
    numbers = [number_of(batch) for batch in batches]
    return numbers if front.in_order else sorted(numbers)


@all_fronts
def test_a_loop_is_left_goes_on_after_an_error_and_has_another_one_beside_it(front: Front) -> None:
    loader, planned = front.make(), [*front.planned]
    for num_taken in (1, 4):
        assert len([batch for _, batch in zip(range(num_taken), loader, strict=False)]) == num_taken
    if front.iterators == "one place":
        assert numbers_of(front, loader) == planned[5:]
    iterator, got = iter(loader), list[Any]()
    with suppress(KeyboardInterrupt):
        for batch in iterator:
            got.append(batch)
            if len(got) == 4:
                raise KeyboardInterrupt
    assert numbers_of(front, [*got, *iterator]) == planned
    assert [*iterator, *iterator] == []

    first = iter(loader)
    got = [next(first)]
    second = iter(loader)
    if front.iterators == "independent":
        pairs = [*zip(first, second, strict=False)]
        assert numbers_of(front, got + [one for one, _ in pairs]) == planned
        assert numbers_of(front, [other for _, other in pairs] + [*second]) == planned
    elif front.iterators == "one place":
        assert numbers_of(front, got + [next(one) for _ in range(5) for one in (second, first)]) == planned[:11]
    else:
        got = [next(second)]
        if front.iterators == "superseded":
            with pytest.raises(RuntimeError, match="superseded"):
                next(first)
        assert (first is second) == (front.iterators == "the same")
        assert numbers_of(front, [*got, *second]) == planned
    loader.close()


@all_fronts
def test_a_load_in_the_middle_begins_another_loop_and_close_ends_all(front: Front) -> None:
    loader, got = front.make(), list[Any]()
    iterator = iter(loader)
    got += [next(iterator) for _ in range(3)]
    if front.saves:
        state = loader.state_dict()
        got += [next(iterator) for _ in range(3)]
        loader.load_state_dict(state)
        if front.iterators == "superseded":
            with pytest.raises(RuntimeError, match="superseded"):
                next(iterator)
        else:
            assert numbers_of(front, [*got, *iterator]) == [*front.planned]
        assert numbers_of(front, [*got[:3], *loader]) == [*front.planned]
    iterators = [iterator, iter(loader)]
    next(iterators[1])
    state = loader.state_dict() if front.saves else {}
    loader.close()
    loader.close()
    for iterator in iterators[front.saves or front.iterators == "superseded" :] * 2:
        text = "closed; iterate over it again" if front.is_torchs else "; make a new"
        with pytest.raises(LoaderClosed, match=text):
            next(iterator)
    assert not front.saves or loader.state_dict() == state
    wait_until(lambda: all("root" in thread.name for thread in threads_of_loaders()), "the threads have ended")
    if front.is_torchs:
        assert len(numbers_of(front, loader)) == NUM_BATCHES - (front.iterators == "one place")
        return
    for use in (lambda: next(iter(loader)), lambda: loader.load_state_dict(state or {"version": 1})):
        with pytest.raises(LoaderClosed):
            use()


@pytest.mark.parametrize(
    "front", [slow(one) if one.has_processes else one for one in INTERRUPTED if one.saves], ids=str
)
def test_a_state_after_each_batch_gives_exactly_the_rest(front: Front) -> None:
    loader, got = front.make(), list[Any]()
    states = [loader.state_dict()]
    for batch in loader:
        got.append(batch)
        states.append(loader.state_dict())
    states.append(loader.state_dict())
    loader.close()
    for num_got, state in enumerate(states):
        fresh = front.make()
        fresh.load_state_dict(state)
        begins = num_got > NUM_BATCHES or (num_got == NUM_BATCHES and not front.is_torchs)
        assert numbers_of(front, [*([] if begins else got[:num_got]), *fresh]) == [*front.planned], num_got
        assert numbers_of(front, fresh) == [*front.planned], num_got
        fresh.close()


@of(front for front in INTERRUPTED if front.works_ahead)
@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_killed_workers_and_other_numbers_of_workers_never_show(front: Front) -> None:
    loader = front.make(worker_restarts=3)
    for num_workers in (2, 1, 3):
        got = list[Any]()
        for batch in loader:
            got.append(batch)
            if len(got) == 3 and front.has_processes:
                os.kill(pid_of(batch), signal.SIGKILL)
            if len(got) == 9 and hasattr(loader, "resize"):
                loader.resize(num_workers)
        assert numbers_of(front, got) == [*front.planned]
    loader.close()


# Threads --------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)  # on a busy machine, it is another program's turn at each line
@pytest.mark.parametrize("front", [(slow if str(one) in FEW else exhaustive)(one) for one in INTERRUPTED], ids=str)
def test_two_threads_in_next_get_each_batch_once(front: Front) -> None:
    loader, errors = front.make(), list[BaseException]()
    for _ in range(2):
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
        for mine in got if front.in_order else ():  # each thread gets its batches in order
            places = [front.planned.index(number) for number in mine]
            assert places == sorted(places)
    loader.close()


def switching(frame: Any, event: str, argument: Any) -> Any:
    """Let another thread run at each line."""
    os.sched_yield()
    return switching


# Closing --------------------------------------------------------------------------------------------------------------


@all_fronts
def test_close_by_another_thread_ends_all_waits(front: Front, tmp_path: Path) -> None:
    loader = front.make(deeds={front.planned[7]: "wait"}, marker=str(tmp_path))
    iterator, got, errors = iter(loader), list[int](), list[BaseException]()

    def take_all() -> None:
        try:
            got.extend(map(number_of, iterator))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=take_all) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: any(tmp_path.iterdir()), "a sample waits")
    closer = threading.Thread(target=loader.close)
    closer.start()
    if not front.works_ahead:  # nobody can end what the loop's thread does itself
        wait_until(lambda: not closer.is_alive() or "closed" in repr(loader), "close has begun")
        Path(tmp_path, GO_ON).touch()
    for thread in threads:
        thread.join(5)
    assert [type(error) for error in errors] == [LoaderClosed] * 2
    assert front.planned[7] not in got
    Path(tmp_path, GO_ON).touch()  # close waits for threads a little
    closer.join()


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


@of(front for front in INTERRUPTED if front.works_ahead)
@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_a_sample_that_takes_too_long_is_a_typed_error(front: Front, tmp_path: Path) -> None:
    loader, got = front.make(deeds={front.planned[7]: "wait"}, marker=str(tmp_path), timeout=0.3), list[int]()
    with pytest.raises(WorkerStalled):
        got.extend(map(number_of, loader))
    assert front.planned[7] not in got
    Path(tmp_path, GO_ON).touch()
    loader.close()


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
def test_a_failed_loader_that_is_dropped_leaves_nothing(front: Front) -> None:
    before = start_root(front)

    def fail(deed: str) -> weakref.ref[Any]:
        loader = front.make(deeds={front.planned[7]: deed})
        iterator = iter(loader)
        with pytest.raises(WorkerDied if deed == "die" else ValueError) as raised:
            list(iterator)
        assert raised.value.__traceback__ is not None
        return weakref.ref(loader)

    for deed in ("die", "raise") if front.has_processes else ("raise",):
        dropped = fail(deed)
        gc.collect()
        assert dropped() is None
        wait_until_only(*before)


# Forks ----------------------------------------------------------------------------------------------------------------


def num_mapped() -> int:
    """Return how many segments of loaders this process has mapped."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:swift_loader" in line for line in maps)


@of(front for front in INTERRUPTED if front.works_ahead)
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_in_a_fork_next_raises_and_takes_nothing_from_the_loop(front: Front) -> None:
    loader = front.make()
    iterator = iter(loader)
    got = [next(iterator) for _ in range(3)]

    def is_told() -> bool:
        for _ in range(2):
            with pytest.raises(SwiftLoaderError, match="is a fork of it"):
                next(iterator)
        return True

    assert is_true_in_a_fork(is_told)
    assert numbers_of(front, [*got, *iterator]) == [*front.planned]
    loader.close()


@pytest.mark.slow
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
    "SwiftLoader": 40,
    "DataLoader": 52,
    "DataLoader to a device": 110,
    "DataLoader of a stream": 58,
    "Pipeline in processes": 90,
    "StageLoader": 55,
}
"""A tenth more than was measured. A `next` that has to wait makes more calls, so a quarter of all count."""


@usual_fronts
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
