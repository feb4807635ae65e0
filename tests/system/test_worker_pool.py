"""Loaders that share worker processes give what they would give with workers of their own."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from swift_loader import DataLoader, LoaderClosed, SwiftLoaderWarning, WorkerPool, WorkerStalled
from tests.support.helpers import exhaustive_unless, is_gone, wait_until
from tests.support.pools import (
    NUM_WORKERS,
    StatefulShares,
    Told,
    ToldStream,
    hang,
    kill,
    nested,
    pids_in,
    samples_of,
    worker_pids,
)


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(NUM_WORKERS) as one:
        yield one


def loop(pool: WorkerPool | None, train: Any, valid: Any, **options: Any) -> list[Any]:
    """Return the batches of two nested loops, on a pool or with workers of their own."""
    torch.manual_seed(5)
    own = {"num_workers": NUM_WORKERS, "multiprocessing_context": "fork"}
    options |= own if pool is None else {"workers": pool}
    shuffle = None if isinstance(train, ToldStream) else True
    outer = DataLoader(train, 4, shuffle, **options)
    return nested(outer, DataLoader(valid, batch_size=3, **options))


def test_nested_loops_give_the_same_batches_in_half_the_processes(pool: WorkerPool) -> None:
    shared = loop(pool, Told(30), Told(11, 1000))
    own = loop(None, Told(30), Told(11, 1000))
    assert samples_of(shared) == samples_of(own)
    assert pids_in(shared) <= set(worker_pids(pool))
    assert len(worker_pids(pool)) == NUM_WORKERS < len(pids_in(own))


@pytest.mark.slow
def test_persistent_workers_of_several_loaders_live_in_one_set_of_processes(pool: WorkerPool) -> None:
    shared = loop(pool, Told(30), Told(11, 1000), persistent_workers=True)
    assert samples_of(shared) == samples_of(loop(None, Told(30), Told(11, 1000), persistent_workers=True))
    assert len(pids_in(shared)) <= NUM_WORKERS


@pytest.mark.parametrize("persistent", exhaustive_unless([False], [False, True]))
def test_nested_streams_have_the_worker_info_and_the_draws_that_torch_gives(pool: WorkerPool, persistent: bool) -> None:
    shared = loop(pool, ToldStream(30), ToldStream(11, 1000), persistent_workers=persistent)
    torch.manual_seed(5)
    loaders = [
        TorchDataLoader(dataset, size, num_workers=NUM_WORKERS, persistent_workers=persistent)
        for dataset, size in ((ToldStream(30), 4), (ToldStream(11, 1000), 3))
    ]
    assert samples_of(shared) == samples_of(nested(*loaders))
    assert len(pids_in(shared)) == NUM_WORKERS


@pytest.mark.slow
def test_torchs_seeding_of_workers_belongs_to_each_loader() -> None:
    with WorkerPool(1) as single:
        torch.manual_seed(6)
        shared = nested(*(DataLoader(Told(12, first), 2, True, workers=single, rng=None) for first in (0, 100)))
    torch.manual_seed(6)
    torchs = nested(*(TorchDataLoader(Told(12, first), 2, True, num_workers=1) for first in (0, 100)))
    assert samples_of(shared) == samples_of(torchs)


class Called:
    """A `worker_init_fn` that changes the dataset of its worker."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def __call__(self, worker_id: int) -> None:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        assert info.id == worker_id
        info.dataset.first += self.offset  # type: ignore[attr-defined]


@pytest.mark.slow
def test_worker_init_fn_runs_for_each_epoch_of_its_loader_only(pool: WorkerPool) -> None:
    train = DataLoader(Told(8), batch_size=4, workers=pool, worker_init_fn=Called(1000))
    valid = DataLoader(Told(8), batch_size=4, workers=pool)
    seen = [batch[0].tolist() for batch in nested(train, valid, at=(0,))]
    epoch = [[1000, 1001, 1002, 1003], [0, 1, 2, 3], [4, 5, 6, 7], [1004, 1005, 1006, 1007]]
    assert seen == epoch * 2


# Failures -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("which", ["train", "valid"])
def test_a_process_that_dies_is_replaced_for_all_loaders_and_one_of_them_is_blamed(
    pool: WorkerPool, which: str, tmp_path: Path
) -> None:
    broken: dict[str, Any] = {"at": 7, "fault": kill, "note": tmp_path / "done"}
    with pytest.warns(SwiftLoaderWarning, match="SIGKILL") as told:
        seen = loop(pool, *(Told(30, first, **broken if name == which else {}) for name, first in FIRST.items()))
    assert samples_of(seen) == samples_of(loop(None, *(Told(30, first) for first in FIRST.values())))
    assert len(told) == 1
    assert len(worker_pids(pool)) == NUM_WORKERS


FIRST = {"train": 0, "valid": 1000}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_streams_continue_where_they_were_after_a_death(pool: WorkerPool, tmp_path: Path) -> None:
    def numbers(batches: list[Any]) -> list[Any]:
        return [batch[0].tolist() for batch in batches]

    seen = loop(pool, ToldStream(30, at=9, note=tmp_path / "a"), ToldStream(20, 1000, at=10, note=tmp_path / "b"))
    assert numbers(seen) == numbers(loop(None, ToldStream(30), ToldStream(20, 1000)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize("victim", ["worker", "template"])
def test_killed_processes_are_replaced_while_two_loops_are_open(pool: WorkerPool, victim: str) -> None:
    torch.manual_seed(5)
    train = DataLoader(Told(30), batch_size=4, shuffle=True, workers=pool)
    valid = DataLoader(Told(11, 1000), batch_size=3, workers=pool)
    seen = []
    for step, batch in enumerate(train):
        seen.append(batch)
        if step in (1, 4):
            for inner, other in enumerate(valid):
                seen.append(other)
                if inner == 1:
                    wait_until(lambda: not any(map(is_gone, worker_pids(pool))), "workers in place of those killed")
                    pid = worker_pids(pool)[step % 2]
                    os.kill(psutil.Process(pid).ppid() if victim == "template" else pid, signal.SIGKILL)
    assert samples_of(seen) == samples_of(loop(None, Told(30), Told(11, 1000)))[: len(seen)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_killing_processes_at_random_loses_nothing_of_three_open_loops(pool: WorkerPool) -> None:
    def loaders() -> list[DataLoader[Any]]:
        torch.manual_seed(9)
        mapped = [DataLoader(Told(length, first), 4, True, workers=pool) for length, first in ((300, 0), (200, 1000))]
        return [*mapped, DataLoader(StatefulShares(240), 4, workers=pool)]

    whole = [[seen_in(batch) for batch in loader] for loader in loaders()]
    rng, seen, open_loops = Random(3), [list[Any]() for _ in whole], list(enumerate(map(iter, loaders())))
    num_since = [0] * len(whole)
    while open_loops:
        number, iterator = rng.choice(open_loops)
        batch = next(iterator, None)
        if batch is not None:
            seen[number].append(seen_in(batch))
            num_since[number] += 1
        else:
            open_loops.remove((number, iterator))
        if all(num_since[other] > MAX_IN_FLIGHT for other, _ in open_loops):  # so no batch is there at two deaths
            num_since = [0] * len(whole)
            with suppress(ProcessLookupError):
                os.kill(rng.choice(worker_pids(pool)), rng.choice([signal.SIGKILL, signal.SIGSEGV]))
    assert seen == whole


MAX_IN_FLIGHT = 10
"""Batches of a loader of two workers."""


def seen_in(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else samples_of([batch])


@pytest.mark.slow
def test_a_process_that_hangs_is_killed_when_its_loader_is_dropped(pool: WorkerPool) -> None:
    hanging = DataLoader(Told(8, at=1, fault=hang), batch_size=2, workers=pool, timeout=1)
    valid = DataLoader(Told(20, 1000), batch_size=2, workers=pool)
    assert len(list(valid)) == 10
    before = worker_pids(pool)
    with pytest.raises(WorkerStalled):
        list(hanging)
    gc.collect()  # the error's traceback refers to the epoch
    assert [batch[0].tolist() for batch in valid] == [[n, n + 1] for n in range(1000, 1020, 2)]
    wait_until(lambda: len(set(before) & set(worker_pids(pool))) == NUM_WORKERS - 1, "the process is replaced")


class Unreadable(Told):
    """Can be sent, but not be rebuilt."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise OSError("the dataset's file is gone")


@pytest.mark.slow
def test_a_dataset_that_cant_be_rebuilt_is_an_error_of_its_loader_only(pool: WorkerPool) -> None:
    train, valid = DataLoader(Told(8), batch_size=4, workers=pool), DataLoader(Unreadable(8), workers=pool)
    for _ in train:
        with pytest.raises(OSError, match="the dataset's file is gone"):
            list(valid)
    assert len(list(train)) == 2


class OpensFile(Told):
    """Opens a file when it is rebuilt, so that forks must not share it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.file = open(__file__)
        self.rebuilt_in = os.getpid()

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        assert self.rebuilt_in == os.getpid()
        return super().__getitem__(index)


@pytest.mark.slow
def test_a_dataset_that_opens_files_is_rebuilt_in_each_process(pool: WorkerPool) -> None:
    seen = loop(pool, OpensFile(30), Told(11, 1000))
    assert samples_of(seen) == samples_of(loop(None, Told(30), Told(11, 1000)))


@pytest.mark.slow
def test_a_dataset_that_cant_be_sent_has_workers_of_its_own(pool: WorkerPool) -> None:
    with open(os.devnull) as file:
        loader = DataLoader(Told(8, fault=lambda: file), batch_size=4, workers=pool)
        assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    del loader
    assert not worker_pids(pool)


# What is shared -------------------------------------------------------------------------------------------------------


class Aware(Dataset[Any]):
    """Says in which process it was rebuilt."""

    built_in = 0

    def __init__(self, length: int) -> None:
        self.length = length

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.built_in = os.getpid()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        return self.length, self.built_in, os.getpid()


def places(batches: Any) -> set[tuple[int, ...]]:
    return {tuple(sample) for batch in batches for sample in zip(*(part.tolist() for part in batch), strict=True)}


@pytest.mark.slow
def test_loaders_that_are_known_when_the_processes_start_share_one_dataset_each(pool: WorkerPool) -> None:
    train, valid = (DataLoader(Aware(length), batch_size=2, workers=pool) for length in (16, 24))
    seen = places(nested(train, valid))
    template = psutil.Process(worker_pids(pool)[0]).ppid()
    assert {built_in for _, built_in, _ in seen} == {template}


@pytest.mark.slow
def test_a_late_loader_is_shared_once_no_loop_is_open(pool: WorkerPool) -> None:
    train = DataLoader(Aware(16), batch_size=2, workers=pool)
    for step, _ in enumerate(train):
        if step == 1:
            late = DataLoader(Aware(24), batch_size=2, workers=pool)
            assert all(built_in == here for _, built_in, here in places(late))  # the other loop needs the processes
    before = set(worker_pids(pool))
    later = DataLoader(Aware(32), batch_size=2, workers=pool)
    assert all(built_in != here for _, built_in, here in places(later))
    assert before.isdisjoint(worker_pids(pool))
    assert all(built_in != here for _, built_in, here in [*places(train), *places(late)])


@pytest.mark.slow
def test_workers_stay_while_train_and_validation_alternate_until_a_dataset_changes(pool: WorkerPool) -> None:
    dataset, other = Told(8), Told(8, 500)
    train, valid = (DataLoader(one, batch_size=4, workers=pool) for one in (dataset, other))
    seen = [batch for _ in range(3) for loader in (train, valid) for batch in loader]
    assert pids_in(seen) <= set(worker_pids(pool))
    dataset.first, other.first = 100, 600
    assert [batch[0].tolist()[0] for batch in (*train, *valid)] == [100, 104, 600, 604]
    assert len(worker_pids(pool)) == NUM_WORKERS


@pytest.mark.slow
def test_loaders_resume_in_the_middle_of_nested_loops(pool: WorkerPool) -> None:
    def loaders(**options: Any) -> tuple[DataLoader[Any], DataLoader[Any]]:
        torch.manual_seed(5)
        train = DataLoader(Told(30), batch_size=4, shuffle=True, **options)
        return train, DataLoader(Told(11, 1000), batch_size=3, shuffle=True, **options)

    outer, inner = loaders(workers=pool)
    steps, others = iter(outer), iter(inner)
    for iterator in (steps, steps, others, steps):
        next(iterator)
    states = outer.state_dict(), inner.state_dict()
    rest = samples_of([*steps, *others])
    again, also = loaders(num_workers=1)
    again.load_state_dict(states[0])
    also.load_state_dict(states[1])
    assert samples_of([*again, *also]) == rest


# Ends -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_end_with_the_last_reference() -> None:
    own = WorkerPool(NUM_WORKERS)
    iterator = iter(DataLoader(Told(30), batch_size=4, workers=own))
    next(iterator)
    pids = worker_pids(own)
    del own
    gc.collect()
    assert len(list(iterator)) == 7  # the loop needs the processes
    del iterator
    gc.collect()
    wait_until(lambda: all(map(is_gone, pids)), "the processes end")


@pytest.mark.slow
def test_a_loader_that_is_dropped_leaves_its_seats(pool: WorkerPool) -> None:
    train, valid = (DataLoader(Told(16, first), batch_size=4, workers=pool) for first in (0, 1000))
    for loader in (train, valid):
        wait_until(lambda one=loader: len(pids_in(list(one))) == NUM_WORKERS, "each process serves each loader")  # type: ignore[misc]
    descriptors = [psutil.Process(pid).num_fds() for pid in worker_pids(pool)]
    del valid, loader
    gc.collect()
    wait_until(
        lambda: all(
            psutil.Process(pid).num_fds() < num for pid, num in zip(worker_pids(pool), descriptors, strict=True)
        ),
        "the processes close the seats of a loader",
    )
    assert len(list(train)) == 4


def test_a_loop_over_a_closed_pool_is_an_error() -> None:
    pool = WorkerPool(NUM_WORKERS)
    loader = DataLoader(Told(30), batch_size=2, workers=pool)
    iterator = iter(loader)
    next(iterator)
    pids = worker_pids(pool)
    pool.close()
    pool.close()
    assert all(map(is_gone, pids))
    with pytest.raises(LoaderClosed):
        list(iterator)
    with pytest.raises(LoaderClosed, match="the WorkerPool was closed"):
        iter(loader)


@pytest.mark.slow
def test_copies_of_a_loader_use_the_same_processes(pool: WorkerPool) -> None:
    loader = DataLoader(Told(8), batch_size=4, workers=pool)
    loaders = [loader, copy.copy(loader), copy.deepcopy(loader)]
    seen = [batch for one in loaders for batch in one]
    assert len(seen) == 6
    assert pids_in(seen) <= set(worker_pids(pool))


@pytest.mark.slow
def test_a_pool_that_is_pickled_with_its_loaders_is_another_one_that_they_share(pool: WorkerPool) -> None:
    loaders = [DataLoader(Told(8), batch_size=4, workers=pool) for _ in range(2)]
    one, other = pickle.loads(pickle.dumps(loaders))
    assert one.workers is other.workers is not pool
    assert len(nested(one, other, at=(1,))) == 8


@pytest.mark.slow
def test_an_epoch_that_is_left_keeps_no_process_from_the_next(pool: WorkerPool) -> None:
    train, valid = (DataLoader(Told(30, first), batch_size=4, workers=pool) for first in (0, 1000))
    for _ in range(5):
        for loader in (train, valid):
            assert next(iter(loader))[0].tolist()[0] == loader.dataset.first  # type: ignore[attr-defined]
    assert len(worker_pids(pool)) == NUM_WORKERS
