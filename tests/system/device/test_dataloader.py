"""DataLoaders that move their batches to a device, ahead of the loop."""

from __future__ import annotations

import functools
import gc
import itertools
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from swift_loader import DataLoader, SwiftLoaderWarning, batch_key
from swift_loader.dataloader import workers
from swift_loader.device.move import Target
from swift_loader.device.pinning import CudaRegistry, PageLock
from swift_loader.device.streams import CopyStream, Transfer
from tests.support.chains import Chain, run_whole
from tests.support.fake_device import FakeDevice, Registry
from tests.support.helpers import exhaustive_unless, wait_until
from tests.support.resumable import SAMPLED, SHARED, STREAMS

KINDS = {
    f"{kind}: {name}": make
    for kind, group in (("sampler", SAMPLED), ("stream", STREAMS), ("shared", SHARED))
    for name, make in group.items()
}
FEW = {"sampler: shuffle", "sampler: own shuffled batches", "stream: dataset, rare snapshots", "shared: iterator"}


class Numbers:
    """Sample i is i, but the bad one fails."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            raise ValueError("a bad sample")
        return index


class Blocks(Numbers):
    """Sample i is 20,000 bytes of i."""

    def __getitem__(self, index: int) -> Any:
        return np.full(20_000, index, np.uint8)


class Everything(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


def loader_of(dataset: Any, num_workers: int, **options: Any) -> DataLoader[Any]:
    given: dict[str, Any] = {"device": "cpu", "max_nb_batch_on_device": 3} | options
    return DataLoader(dataset, 2, num_workers=num_workers, **given)


def wait_for_ready(loader: DataLoader[Any], count: int) -> None:
    epoch = loader._latest
    assert epoch is not None
    assert epoch.workers is not None
    engine = epoch.workers.engine
    wait_until(lambda: engine.num_ready >= count, f"{count} batches are ready")


# The position ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", exhaustive_unless(FEW, KINDS))
def test_a_state_counts_no_batch_that_is_ahead(name: str, num_workers: int) -> None:
    to_device = functools.partial(KINDS[name], device="cpu", max_nb_batch_on_device=3)
    assert Chain(to_device, (num_workers,)).run(6, 4) == run_whole(KINDS[name], num_workers, 4)


def test_out_of_order_what_is_ahead_comes_again_after_a_resume() -> None:
    loader = loader_of(Numbers(), 2, in_order=False)
    iterator = iter(loader)
    got = next(iterator).tolist()
    wait_for_ready(loader, 4)
    got += next(iterator).tolist()
    resumed = loader_of(Numbers(), 2, in_order=False)
    resumed.load_state_dict(loader.state_dict())
    assert sorted([*got, *(number for batch in resumed for number in batch.tolist())]) == list(range(24))


def with_key(batch: Any, device: torch.device) -> Any:
    return batch.tolist(), batch_key()


@pytest.mark.parametrize("dataset", [Numbers(), Everything()], ids=["map-style", "stream"])
def test_keys_depend_on_the_batch_alone_also_after_a_resume(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"to_device": with_key, "seed": 3}
    options |= {"shard_stream": True} if isinstance(dataset, IterableDataset) else {}
    loader = loader_of(dataset, 2, **options)
    iterator = iter(loader)
    first = [next(iterator) for _ in range(5)]
    state = loader.state_dict()
    first += iterator
    second = list(loader)
    assert len({key for _, key in first + second}) == 2 * len(first)
    for num_workers in (0, 1, 2):
        resumed = loader_of(dataset, num_workers, **options)
        resumed.load_state_dict(state)
        assert [list(resumed), list(resumed)] == [first[5:], second]
    assert next(iter(loader_of(dataset, 0, **options, worker_type="thread"))) == first[0]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert next(iter(loader_of(dataset, 0, **options)))[1] != first[0][1]


# Errors, the end, and what comes after --------------------------------------------------------------------------------


def failing(batch: Any, device: torch.device) -> Any:
    if batch[0] == 12:
        raise StopIteration
    return batch.tolist()


@pytest.mark.parametrize("options", [{}, {"worker_type": "thread"}, {"persistent_workers": True}], ids=str)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_takes_only_the_place_of_its_batch(num_workers: int, options: Any) -> None:
    loader = loader_of(Numbers(bad=7), num_workers, to_device=failing, **(options if num_workers else {}))
    for _ in range(2):
        iterator, got = iter(loader), list[Any]()
        for position in range(12):
            if position == 6 and num_workers:
                wait_for_ready(loader, 1)
            try:
                got.append(next(iterator))
            except (ValueError, RuntimeError) as error:
                got.append(str(error).partition("\n")[0])
            if position == 6:
                state = loader.state_dict()
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(iterator)
        assert [got[3], got[6]] == ["a bad sample", "to_device raised StopIteration, which would end the epoch early"]
        assert [*got[:3], *got[4:6], *got[7:]] == [[n, n + 1] for n in range(0, 24, 2) if n not in (6, 12)]
    resumed = loader_of(Numbers(bad=7), num_workers)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == got[7:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_iterators_give_all_batches_each(num_workers: int) -> None:
    loader = loader_of(Numbers(), num_workers)
    pairs = [(one.tolist(), other.tolist()) for one, other in zip(loader, loader, strict=True)]
    assert pairs == [([n, n + 1],) * 2 for n in range(0, 24, 2)]


def test_without_workers_nothing_is_fetched_ahead() -> None:
    fetched: list[int] = []

    class Noting(Numbers):
        def __getitem__(self, index: int) -> int:
            fetched.append(index)
            return index

    next(iter(loader_of(Noting(), 0)))
    assert fetched == [0, 1]


def test_no_more_are_moved_ahead_than_were_asked_for() -> None:
    moved: list[int] = []
    loader = loader_of(Numbers(), 1, to_device=lambda batch, device: moved.append(1))
    iterator = iter(loader)
    next(iterator)
    for position in (2, 3):
        wait_for_ready(loader, 4)
        next(iterator)
        assert len(moved) == position + 3
    list(iterator)
    observations = loader.report().observations
    assert observations is not None
    assert observations.setup.has_device
    assert (observations.batches["copy_ns"] > 0).all()


def test_all_ahead_is_enough_for_a_worker_to_go_on() -> None:
    loader = loader_of(Numbers(), 1, prefetch_factor=1)
    assert [batch.tolist() for batch in loader] == [[n, n + 1] for n in range(0, 24, 2)]


def test_streams_that_all_workers_repeat_get_their_warning() -> None:
    with pytest.warns(SwiftLoaderWarning, match="each of 2 workers gives the same samples"):
        assert len(list(loader_of(Everything(), 2, to_device=lambda batch, device: None))) == 40


# Options --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"device": None, "dtype": torch.half}, TypeError, "dtype was given without a device"),
        ({"to_device": 3}, TypeError, "to_device is a int"),
        ({"dtype": torch.int8}, TypeError, "dtype=torch.int8"),
        ({"device": "cpuu"}, ValueError, "device='cpuu' is unknown to torch"),
        ({"max_nb_batch_on_device": 0}, ValueError, "max_nb_batch_on_device=0"),
    ],
)
def test_wrong_options_of_the_device_are_told_at_once(options: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        loader_of(Numbers(), 0, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is there")
def test_the_device_is_asked_for_as_an_epoch_begins() -> None:
    loader = loader_of(Numbers(), 0, device="cuda")
    with pytest.raises(RuntimeError, match=r"device='cuda'"):
        iter(loader)


def test_a_copy_and_a_loader_made_from_its_attributes_have_the_device() -> None:
    loader = loader_of(Blocks(), 0, dtype=torch.bfloat16, collate_fn=floats, pin_memory=True)
    names = ("device", "to_device", "dtype", "max_nb_batch_on_device", "dataset", "collate_fn")
    made = DataLoader(**{name: getattr(loader, name) for name in names})
    for one in (loader, made, pickle.loads(pickle.dumps(loader))):
        batch = next(iter(one))
        assert batch.dtype == torch.bfloat16
        assert not batch.is_pinned()


def floats(samples: Any) -> Any:
    return np.stack(samples).astype(np.float32)


def test_a_subclass_may_have_a_device_of_its_own() -> None:
    class Mine(DataLoader[Any]):
        device: Any

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.device = "mine"

    assert next(iter(Mine(Numbers(), 2))).tolist() == [0, 1]


# A device that delays copies ------------------------------------------------------------------------------------------


@pytest.fixture
def on_fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return what makes a loader of `Blocks` that goes to a fake device."""

    def make(device: FakeDevice, registry: Registry, **options: Any) -> DataLoader[Any]:
        class FakeTarget(Target):
            def make_page_lock(self, notices: deque[str]) -> PageLock:
                return PageLock(cast(CudaRegistry, registry), notices)

            def make_stream(self) -> CopyStream:
                return device

            def move(self, batch: Any, transfer: Transfer) -> Any:
                return device.move(batch.numpy(), transfer)

        target = FakeTarget(None, None, None)
        monkeypatch.setattr(workers, "find_target", lambda *_, **__: target)
        return loader_of(Blocks(), 2, multiprocessing_context="fork", **options)

    return make


def check(batches: list[Any]) -> None:
    assert all((batch == np.array([[2 * step], [2 * step + 1]])).all() for step, batch in enumerate(batches))


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_what_is_left_waits_for_its_copies_and_leaves_nothing(on_fake: Any, persistent_workers: bool) -> None:
    device, registry, num_copies = FakeDevice(lag=99), Registry(), 0
    loader = on_fake(device, registry, persistent_workers=persistent_workers)
    gc.disable()
    try:
        for num_taken in (1, 5, 12, 12):
            iterator = iter(loader)
            batches = list(itertools.islice(iterator, num_taken - 1))
            wait_for_ready(loader, 4 if num_taken < 6 else 0)
            batches.append(next(iterator))
            dropped = [weakref.ref(transfer.batch) for _, transfer in loader._latest._pull.__self__._ahead]
            num_copies += len(batches) + len(dropped)
            assert device._num_recorded == num_copies
            loader._iterator = None
            del iterator
            if not persistent_workers:  # else the next epoch ends this one
                assert device.num_passed == num_copies, "it waits for the copies"
                assert not any(segment.before_unmapping for segment in loader._pool._free)
                assert not any(batch() is not None for batch in dropped)
            device.run()
            check(batches)
            del batches
        del loader
        assert registry.locked == {}, "still page-locked, though nobody has it any more"
    finally:
        gc.enable()
