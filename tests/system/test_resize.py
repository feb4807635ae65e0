"""Workers come and go while the loop runs, and nothing of that shows in what it gets."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from swift_loader import LoaderClosed, SwiftLoader, SwiftLoaderWarning
from tests.support import datasets
from tests.support.checked import Checked, Reference, digest
from tests.support.helpers import exhaustive, ids_of, make_loader, slow, wait_until, worker_processes
from tests.support.killer import Aim, Killer
from tests.support.resizing import NeedsAnother, WaitsToBuild, await_workers, calling, num_ready

OPTIONS: dict[str, Any] = {"kwargs": {"num_samples": 200}, "batch_size": 4}
NUM_BATCHES = 50

WORKERS: dict[str, dict[str, Any]] = {
    "processes": {},
    "threads": {"worker_type": "thread", "rng": None},
    "spawn": {"start_method": "spawn"},
    "fork": {"start_method": "fork"},
    "own datasets": {"dataset_per_worker": True},
    "one receiver": {"multithread": False},
}
KINDS = [*list(WORKERS)[:2], *map(slow, list(WORKERS)[2:])]
RESIZES = {7: 4, 25: 2, 40: 1, NUM_BATCHES - 1: 3, NUM_BATCHES + 20: 1}
"""By number of batches over two epochs."""

reference = Reference(lambda: make_loader(Checked, workers=0, **OPTIONS))


def resizing(loader: SwiftLoader, sizes: Mapping[int, int], *, waits: bool = True) -> Generator[Any, None, None]:
    """Yield each batch of two epochs, and resize after some. `waits`: until the new number is there."""
    number = 0
    for _ in range(2):
        for batch in loader:
            yield batch
            if number in sizes:
                loader.resize(sizes[number])
                if waits:
                    await_workers(loader, sizes[number])
            number += 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("waits", [True, exhaustive(False)])
def test_bytes_and_order_are_those_of_a_loader_without_resizes(kind: str, waits: bool) -> None:
    is_thread = kind == "threads"  # threads draw from the loop's generators, so only the samples can be compared
    dataset = datasets.Counting if is_thread else Checked
    with make_loader(dataset, workers=1, **OPTIONS, **WORKERS[kind]) as loader:
        batches = list(resizing(loader, RESIZES, waits=waits))
        assert loader.report()["worker_restarts"] == 0
        assert loader.worker_per_consumer == 1
        await_workers(loader, 1)
    if is_thread:
        with make_loader(dataset, workers=0, **OPTIONS) as loader:
            expected = [digest(batch) for _ in range(2) for batch in loader]
    else:
        expected = reference.epoch(0) + reference.epoch(1)
    assert [digest(batch) for batch in batches] == expected


def test_many_resizes_of_another_thread_never_show_in_the_data() -> None:
    rng = Random(1)
    with make_loader(Checked, workers=2, **OPTIONS) as loader:
        loader.start(0)
        with calling(lambda: loader.resize(rng.randint(1, 5)), every_s=0.02):
            for epoch in range(10):
                loader.set_epoch(epoch % 2)
                reference.compare([digest(batch) for batch in loader], epoch % 2, in_order=True)
        assert loader.report()["worker_restarts"] == 0
        loader.resize(3)
        await_workers(loader, 3)


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize(("seed", "num_kills"), [(1, 6), exhaustive(2, 40), exhaustive(3, 40)])
@pytest.mark.parametrize("in_order", [True, exhaustive(False)])
def test_workers_that_are_killed_during_resizes_never_show_in_the_data(
    seed: int, num_kills: int, in_order: bool
) -> None:
    rng = Random(seed)
    options = {**OPTIONS, "in_order": in_order, "validate": False, "timeout": 20.0}
    aims = [rng.choice([Aim.ANYONE, Aim.UNREAD]) for _ in range(num_kills)] + [Aim.TEMPLATE] * (num_kills // 10)
    with make_loader(Checked, workers=2, **options) as loader:
        loader.start(0)
        with (
            Killer(loader, aims, Random(seed)) as killer,
            calling(lambda: loader.resize(rng.randint(1, 4)), every_s=0.1),
        ):
            for number in range(500):
                loader.set_epoch(number % 2)
                reference.compare([digest(batch) for batch in loader], number % 2, in_order=in_order)
                if killer.is_done:
                    break
        killer.check()
        assert killer.kills.total() >= num_kills // 2
        loader.resize(2)
        await_workers(loader, 2)


def test_a_state_knows_no_number_of_workers_and_resumes_around_resizes() -> None:
    got: list[bytes] = []
    state: dict[str, int] | None = None
    for num_batches, before, after in ((10, 1, 3), (45, 3, 1), (45, 2, 4)):
        with make_loader(Checked, workers=before, **OPTIONS) as loader:
            if state is not None:
                loader.load_state_dict(state)
            sizes = {number: after if number % 2 else before for number in range(0, num_batches, 7)}
            batches = resizing(loader, sizes, waits=False)
            got += [digest(next(batches)) for _ in range(num_batches)]
            state = loader.state_dict()
            loader.resize(5)
            assert loader.state_dict() == state
            batches.close()
    assert got == reference.epoch(0) + reference.epoch(1)


@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_loader_gets_and_loses_workers(kind: str) -> None:
    with make_loader(datasets.Counting, workers=2, shuffle=False, **OPTIONS, **WORKERS[kind]) as loader:
        iterator = iter(loader)
        first = [next(iterator) for _ in range(20)]
        for number in (5, 1, 3):
            loader.resize(number)
            await_workers(loader, number)
        assert ids_of([*first, *iterator]) == list(range(200))


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_another_thread_adds_while_the_loop_waits_helps_at_once(kind: str, tmp_path: Path) -> None:
    kwargs = {"marker": str(tmp_path / "marker")}
    options = {"kwargs": kwargs, "batch_size": 4, "shuffle": False, "validate": False, **WORKERS[kind]}
    with make_loader(NeedsAnother, workers=1, **options) as loader:
        loader.start(0)
        timer = threading.Timer(0.3, loader.resize, (2,))
        timer.start()
        try:
            assert ids_of(loader) == list(range(40))
        finally:
            timer.join()


@pytest.mark.parametrize("kind", ["own datasets", "threads", slow("spawn")])
def test_a_worker_that_takes_long_to_start_holds_up_nothing(kind: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    options = {**WORKERS[kind], "dataset_per_worker": True, "kwargs": {"marker": str(marker)}, "shuffle": False}
    with make_loader(WaitsToBuild, workers=2, **options) as loader:
        loader.start(0)
        await_workers(loader, 2)
        marker.touch()
        try:
            loader.resize(3)
            for _ in range(2):
                assert ids_of(loader) == list(range(100))
            assert num_ready(loader) == 2
        finally:
            marker.unlink()
        await_workers(loader, 3)


def test_a_worker_that_is_not_wanted_any_more_when_it_is_ready_leaves() -> None:
    with make_loader(datasets.Counting, workers=1) as loader:
        loader.start(0)
        for _ in range(3):
            loader.resize(6)
            loader.resize(1)
        await_workers(loader, 1)
        assert sorted(ids_of(loader)) == list(range(100))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_workers_that_left_stay_as_they_were(kind: str) -> None:
    options = {**WORKERS[kind], "kwargs": {"num_samples": 160}, "batch_size": 4, "shuffle": False}
    kept: list[Any] = []
    with make_loader(datasets.Images, workers=4, **options) as loader:
        for number, batch in enumerate(loader):
            kept.append(batch)
            if number == 15:
                loader.resize(1)
                await_workers(loader, 1)
    for number, batch in enumerate(kept):
        assert (np.asarray(batch) == np.arange(4 * number, 4 * number + 4, dtype=np.uint8)[:, None, None, None]).all()


def test_a_worker_that_left_has_left_no_process() -> None:
    with make_loader(datasets.Counting, workers=4) as loader:
        list(loader)
        loader.resize(1)
        await_workers(loader, 1)
        wait_until(lambda: len(worker_processes()) == 1, "the end of three processes")


def test_more_workers_are_heard_on_more_threads() -> None:
    def num_threads() -> int:
        return sum(thread.name == "swift_loader-receiver" for thread in threading.enumerate())

    with make_loader(datasets.Counting, workers=1) as loader:
        loader.start(0)
        loader.resize(5)
        list(loader)
        await_workers(loader, 5)
        assert num_threads() == 5


@pytest.mark.parametrize(("given", "expected"), [(None, [10, 24, 10]), (7, [7, 7, 7])])
def test_the_limit_of_batches_in_flight_follows_unless_it_was_given(given: int | None, expected: list[int]) -> None:
    found = []
    with make_loader(datasets.Counting, workers=1, data_queue_size=given) as loader:
        loader.start(0)
        assert loader._session is not None
        for number in (2, 8, 1):
            if given is not None and given < number:
                with pytest.warns(SwiftLoaderWarning, match="data_queue_size=7 keeps at most 7 of"):
                    loader.resize(number)
            else:
                loader.resize(number)
            found.append(loader._session.engine._scheduler.ledger.workers.limits.max_in_flight)
            assert f"{number} worker" in repr(loader)
            assert f"at most {found[-1]} in flight" in repr(loader)
    assert found == expected


@pytest.mark.parametrize("prepares", [False, True])
def test_before_the_start_it_is_the_option_that_changes(prepares: bool) -> None:
    with make_loader(datasets.Counting, workers=1) as loader:
        if prepares:
            loader.prepare()
        loader.resize(3)
        assert (loader.worker_per_consumer, "3 workers" in repr(loader)) == (3, True)
        loader.start(0)
        await_workers(loader, 3)
        assert sorted(ids_of(loader)) == list(range(100))


@pytest.mark.slow
@pytest.mark.timeout(300)  # on a busy machine, it is another program's turn at each line
def test_a_resize_while_another_thread_starts_the_loader_counts_or_is_refused() -> None:
    def switching(frame: Any, event: str, argument: Any) -> Any:  # lets the other thread run at each line
        os.sched_yield()
        return switching

    for _ in range(10):
        loader = make_loader(datasets.Counting, workers=1, validate=False, **WORKERS["threads"])
        number, refused, barrier = 1, "", threading.Barrier(2)

        def start(loader: SwiftLoader = loader, barrier: threading.Barrier = barrier) -> None:
            sys.settrace(switching)
            barrier.wait()
            loader.start(0)

        thread = threading.Thread(target=start)
        thread.start()
        barrier.wait()
        try:
            loader.resize(3)
            number = 3
        except RuntimeError as error:
            refused = str(error)
        thread.join()
        assert not refused or "is starting" in refused
        assert loader.worker_per_consumer == number
        await_workers(loader, number)
        loader.close()


def test_numbers_that_are_not_allowed_are_refused_and_change_nothing() -> None:
    with make_loader(datasets.Counting, workers=2) as loader:
        for _ in range(2):
            with pytest.raises(ValueError, match="worker_per_consumer=0 is too small; it must be at least 1"):
                loader.resize(0)
            with pytest.raises(ValueError, match="it must be at most 4096"):
                loader.resize(5000)
            with pytest.raises(TypeError, match="it must be an integer"):
                loader.resize("2")  # type: ignore[arg-type]
            if not loader.has_started:
                loader.start(0)
        assert loader.worker_per_consumer == 2
    with pytest.raises(LoaderClosed):
        loader.resize(2)


def test_a_loader_without_workers_says_that_it_gets_none() -> None:
    with make_loader(datasets.Counting, workers=0) as loader:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="worker_per_consumer=0 builds batches in the calling thread"):
                loader.resize(2)
            list(loader)


def test_threads_with_copies_of_a_dataset_can_only_become_fewer() -> None:
    options: dict[str, Any] = {"dataset": datasets.Counting(), "dataset_per_worker": True, "worker_type": "thread"}
    with SwiftLoader(batch_size=4, worker_per_consumer=2, shuffle=False, **options) as loader:
        loader.start(0)
        with pytest.raises(RuntimeError, match="can't be copied while others use it"):
            loader.resize(3)
        assert loader.worker_per_consumer == 2
        loader.resize(1)
        await_workers(loader, 1)
        assert ids_of(loader) == list(range(100))
