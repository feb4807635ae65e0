"""What programs do with the worker processes of torch's iterators works with ours."""

from __future__ import annotations

import copy
import gc
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from swift_loader import DataLoader, EncodeError
from swift_loader.executors.process import starter
from tests.support.datasets import identity
from tests.support.helpers import LIKE_A_FORK, exhaustive, loader_processes, slow

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

JOIN_S = 20


class Workers:
    """Each sample tells which process has fetched it."""

    label = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        info = get_worker_info()
        assert info is not None
        return info.id, os.getpid(), self.label


def make(**options: Any) -> Any:
    dataset: Any = Workers()
    return DataLoader(dataset, **{"num_workers": 2, "multiprocessing_context": "fork", **options})


def told(iterator: Any) -> set[tuple[int, ...]]:
    return {tuple(int(number) for number in batch) for batch in iterator}


@pytest.mark.parametrize("options", [{}, {"num_workers": 5}, exhaustive({"persistent_workers": True})])
def test_an_iterator_lists_its_workers_by_id_during_the_epoch_and_after_it(options: dict[str, Any]) -> None:
    loader = make(**options)
    iterator = iter(loader)
    pids = [worker.pid for worker in iterator._workers]
    assert len(pids) == loader.num_workers
    assert told(iterator) == {(number, pid, 0) for number, pid in enumerate(pids)}
    assert [worker.ident for worker in iterator._workers] == pids
    for worker in iterator._workers:
        worker.join(0 if loader.persistent_workers else JOIN_S)
        assert worker.is_alive() == loader.persistent_workers == (worker.exitcode is None)
        assert worker.daemon


@pytest.mark.parametrize("method", ["fork", "forkserver", slow("spawn")])
def test_workers_end_with_the_loader_and_tell_so(method: str) -> None:
    loader = make(multiprocessing_context=method)
    iterator = iter(loader)
    next(iterator)
    workers = iterator._workers
    workers[0].join(0)
    assert workers[0].is_alive()
    del loader, iterator
    for worker in workers:
        worker.join(JOIN_S)
        assert not worker.is_alive()
        assert worker.exitcode == 0
        worker.terminate()  # as cleaning up does it: nothing happens
        assert "ended" in repr(worker)


def test_a_worker_that_somebody_ends_is_replaced() -> None:
    iterator = iter(make())
    next(iterator)
    first, second = iterator._workers
    first.kill()
    second.terminate()
    for worker in (first, second):
        worker.join(JOIN_S)
    with pytest.warns(UserWarning, match="replace"):
        assert len(list(iterator)) == 11
    assert [first.exitcode, second.exitcode] == [-signal.SIGKILL, -signal.SIGTERM]
    assert {one.pid for one in iterator._workers}.isdisjoint({first.pid, second.pid})


def test_without_workers_there_is_no_list_of_them() -> None:
    assert not hasattr(iter(DataLoader([1])), "_workers")  # type: ignore[arg-type]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_were_shut_down_give_no_more_batches_and_are_replaced_in_the_next_epoch(persistent: bool) -> None:
    loader = make(persistent_workers=persistent)
    iterator = iter(loader)
    next(iterator)
    workers = iterator._workers
    iterator._shutdown_workers()
    assert not any(worker.is_alive() for worker in workers)
    assert list(iterator) == []
    iterator._shutdown_workers()
    assert len(told(loader)) == 2


def test_a_loader_whose_iterator_is_dropped_gets_workers_that_have_the_changed_dataset() -> None:
    loader = make(persistent_workers=True)
    assert {label for _, _, label in told(loader)} == {0}
    loader.dataset.label = 1
    assert {label for _, _, label in told(loader)} == {0}
    before = loader._iterator._workers
    loader._iterator._shutdown_workers()
    loader._iterator = None
    assert {label for _, _, label in told(loader)} == {1}
    loader.dataset.label = 2
    loader._iterator = None
    assert {label for _, _, label in told(loader)} == {2}
    assert not any(worker.is_alive() for worker in before)


def test_persistent_workers_have_one_iterator_that_begins_again() -> None:
    loader = make(persistent_workers=True)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert second is first is loader._iterator
    assert len(list(first)) == 12
    assert next(second, None) is None
    copied = copy.deepcopy(loader)
    assert copied._iterator is None
    assert make()._iterator is None


def test_a_loader_with_persistent_workers_ends_them_with_its_last_reference() -> None:
    gc.disable()
    try:
        loader = make(persistent_workers=True)
        assert isinstance(next(iter(loader))[0], torch.Tensor)
        workers = loader._iterator._workers
        del loader
        assert not any(worker.is_alive() for worker in workers)
    finally:
        gc.enable()


def test_the_workers_of_an_epoch_write_where_those_before_them_did_but_not_to_what_anybody_has() -> None:
    rows: Any = torch.arange(24.0).repeat_interleave(1 << 16).reshape(24, -1)
    loader = DataLoader(rows, 2, num_workers=2, multiprocessing_context="fork")
    kept, files = list[Any](), list[set[str]]()
    for _ in range(3):
        files.append(set())
        for number, batch in enumerate(loader):
            ranges = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
            files[-1] |= {
                inode for start, _, _, _, inode, *_ in ranges if int(start.split("-")[0], 16) == batch.data_ptr()
            }
            kept += [batch] if number == 5 else []
        num_open = len(os.listdir("/proc/self/fd"))
    assert files[1] & files[2]
    if (child := os.fork()) == 0:  # it iterates at the same time over other rows, and has what is kept
        with suppress(BaseException):
            np.negative(rows.numpy(), out=rows.numpy())  # OpenMP, which torch uses, hangs in forks
            batches = list(loader)
            os._exit(int([-row[-1].item() for batch in batches for row in batch] != list(range(24))))
        os._exit(1)
    batches = list(loader)
    assert [row[-1].item() for batch in batches for row in batch] == list(range(24))
    assert [batch[:, -1].tolist() for batch in kept] == [[10, 11]] * 3
    del batch, batches, kept
    assert os.waitpid(child, 0)[1] == 0
    assert len(os.listdir("/proc/self/fd")) <= num_open


def test_break_starts_no_new_workers() -> None:
    loader, seen = make(num_workers=1), []
    for _ in range(3):
        for _ in loader:
            break
        seen.append({process.pid for process in loader_processes()})
    assert seen[0] == seen[1] == seen[2]


def test_workers_that_persist_keep_their_seed_after_break() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = make(num_workers=1, persistent_workers=True, generator=generator)
    for _ in loader:
        break
    state = generator.get_state()
    first = iter(loader)
    assert torch.equal(generator.get_state(), state)
    second = iter(loader)
    assert torch.equal(generator.get_state(), state)
    assert len(list(second)) == 12
    assert list(first) == []


class Keyed:
    """Has no length; a sample is its key."""

    def __getitem__(self, key: Any) -> Any:
        return key


def test_keys_of_any_kind_and_number_reach_the_dataset() -> None:
    many = list(range(100_000))
    batches: list[Any] = [[0, 1], ["a", "b"], [[1, 2], [3]], [(1, "x"), None], many, many[::-1]]
    dataset: Any = Keyed()
    options: dict[str, Any] = {"num_workers": 2, "collate_fn": identity, **LIKE_A_FORK}
    assert list(DataLoader(dataset, batch_sampler=batches, **options)) == batches
    keys: Any = [3, "a", None, (1, 2)]
    assert list(DataLoader(dataset, batch_size=None, sampler=keys, **options)) == keys


def test_a_key_that_can_not_be_sent_is_an_error_in_the_place_of_its_batch() -> None:
    dataset: Any = Keyed()
    options: dict[str, Any] = LIKE_A_FORK
    batches: Any = [[1], [lambda: 0], [2]]
    iterator = iter(DataLoader(dataset, batch_sampler=batches, num_workers=2, **options))
    found = [next(iterator).tolist()]
    with pytest.raises(EncodeError):
        next(iterator)
    assert found + [batch.tolist() for batch in iterator] == [[1], [2]]


class Informed(Workers):
    """A sample says what torch tells about the worker, and what `initialise` has drawn."""

    drawn = ""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return info.id, info.num_workers, info.seed, self.drawn


def initialise(worker_id: int) -> None:
    info: Any = get_worker_info()
    info.dataset.drawn = f"{worker_id} {random.random()} {np.random.rand()} {torch.rand(())}"


def test_workers_know_who_they_are_and_are_seeded_as_torchs() -> None:
    dataset: Any = Informed()
    options: dict[str, Any] = {"num_workers": 3, "worker_init_fn": initialise, "collate_fn": identity}
    found = []
    own: dict[str, Any] = {"rng": None, "in_order": False, **LIKE_A_FORK}
    for loader_class, more in ((torch.utils.data.DataLoader, {}), (DataLoader, own)):
        torch.manual_seed(5)
        loader: Any = loader_class(dataset, **options, **more)
        found.append([{sample for (sample,) in loader} for _ in range(2)])
    ours, torchs = found[1], found[0]
    assert all(some and some <= all_of_them for some, all_of_them in zip(ours, torchs, strict=True))


class Waiting:
    """Waits when it is unpickled until the folder has so many entries. Each process adds one."""

    def __init__(self, folder: Path, first: int, later: int) -> None:
        self.folder, self.first, self.later = folder, first, later

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        number = self.later if any(self.folder.iterdir()) else self.first
        (self.folder / str(os.getpid())).touch()
        while len(list(self.folder.iterdir())) < number:
            time.sleep(0.01)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.slow
@pytest.mark.parametrize(("cores", "first", "later"), [(2, 2, 2), (1, 0, 3)], ids=["together", "then others"])
def test_with_spawn_as_many_interpreters_start_at_a_time_as_there_are_cores_and_the_first_batch_waits_for_one(
    cores: int, first: int, later: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter, "num_cores", lambda: cores)
    dataset: Any = Waiting(tmp_path, first, later)
    iterator = iter(DataLoader(dataset, num_workers=2, multiprocessing_context="spawn"))
    next(iterator)
    (tmp_path / "batch").touch()
    assert len(list(iterator)) == 11


class Delegating:
    """Has the attributes of what it wraps, in the way that pickle can't rebuild."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


class Guarded(Delegating):
    """Has the guard that the error advises."""

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return super().__getattr__(name)


@pytest.mark.parametrize("method", ["forkserver", slow("spawn")])
def test_the_error_names_a_getattr_that_calls_itself_while_the_dataset_is_unpickled(method: str) -> None:
    dataset: Any = Delegating(Workers())
    advice = r"Delegating can't be unpickled.* self\.inner,.* `if name == 'inner': .*multiprocessing_context='fork'"
    with pytest.raises(RecursionError, match=advice):
        iter(DataLoader(dataset, num_workers=1, multiprocessing_context=method))
    assert len(told(DataLoader(dataset, num_workers=1, multiprocessing_context="fork"))) == 1
    dataset = Guarded(Workers())
    assert len(told(DataLoader(dataset, num_workers=1, multiprocessing_context=method))) == 1


@slow
def test_workers_that_are_being_started_can_be_replaced() -> None:
    loader = make(num_workers=starter.num_cores() + 1, multiprocessing_context="spawn", persistent_workers=True)
    iter(loader)
    loader._workers.engine.is_dirty = True  # as an interrupt leaves it
    assert len(told(iter(loader))) == len(Workers())
