from __future__ import annotations

import gc
import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from swift_loader import DevicePrefetcher, batch_key
from swift_loader.device.move import Target
from swift_loader.device.streams import CopyStream, Transfer
from tests.support.datasets import Counting
from tests.support.fake_device import FakeDevice
from tests.support.helpers import make_loader
from tests.support.sources import NUM_BATCHES, Counted, LikeDali, LikeFfcv, arrays, numbers

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("depth", [1, 2, 9])
@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda: [torch.tensor(number) for number in range(NUM_BATCHES)], int),
        (lambda: (torch.tensor(number) for number in range(NUM_BATCHES)), int),
        (lambda: DataLoader(range(NUM_BATCHES), batch_size=1), int),  # type: ignore[arg-type]
        (LikeFfcv, lambda batch: int(batch[0])),
        (LikeDali, lambda batch: int(batch[0]["data"])),
    ],
)
def test_the_batches_of_any_source_come_in_order(
    make: Callable[[], Any], read: Callable[[Any], int], depth: int
) -> None:
    prefetcher = DevicePrefetcher(make(), "cpu", max_nb_batch_on_device=depth)
    assert [read(batch) for batch in prefetcher] == list(range(NUM_BATCHES))


def test_a_swift_loader_is_a_source_too() -> None:
    with make_loader(Counting, workers=2, shuffle=False) as loader:
        batches = list(DevicePrefetcher(loader, "cpu"))
    assert torch.cat([batch["id"] for batch in batches]).tolist() == list(range(100))


@pytest.mark.parametrize("depth", [1, 3])
def test_the_source_is_asked_for_so_many_ahead_and_for_none_before_the_first(depth: int) -> None:
    source = Counted()
    prefetcher = DevicePrefetcher(source, "cpu", max_nb_batch_on_device=depth)
    batches = iter(prefetcher)
    assert source.num_given == 0
    next(batches)
    assert source.num_given == 1 + depth
    assert repr(prefetcher) == f"<DevicePrefetcher of Counted to cpu, {depth} ahead>"


def late_prefetcher(monkeypatch: pytest.MonkeyPatch, source: Any) -> tuple[DevicePrefetcher, FakeDevice, list[Any]]:
    """Return a prefetcher to a device that makes no copy by itself, and what it has moved."""
    device, moved = FakeDevice(lag=9), list[Any]()

    class LateTarget(Target):
        def make_stream(self) -> CopyStream:
            return device

        def move(self, batch: Any, transfer: Transfer) -> Any:
            moved.append(device.move(batch, transfer))
            return moved[-1]

    monkeypatch.setattr("swift_loader.device.prefetch.Target", LateTarget)
    return DevicePrefetcher(source, "cpu"), device, moved


def test_a_source_is_not_asked_again_before_the_copies_of_its_last_batch_are_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reusing() -> Iterator[Any]:
        buffer = np.empty(1000, np.int64)
        for number in range(NUM_BATCHES):
            buffer[:] = number
            yield buffer

    prefetcher, device, _ = late_prefetcher(monkeypatch, reusing())
    moved = list(prefetcher)
    device.run()
    assert [set(batch.tolist()) for batch in moved] == [{number} for number in range(NUM_BATCHES)]


@pytest.mark.parametrize("deed", ["dropped", "closed"])
def test_what_ends_with_copies_under_way_waits_for_them(monkeypatch: pytest.MonkeyPatch, deed: str) -> None:
    prefetcher, device, moved = late_prefetcher(monkeypatch, (np.full(1000, number) for number in range(3)))
    batches = iter(prefetcher)
    next(batches)
    assert device.num_passed == 1, "of two"
    if deed == "closed":
        with prefetcher:
            pass
        prefetcher.close()
        with pytest.raises(RuntimeError, match=r"ended by close\(\)"):
            next(batches)
    else:
        del prefetcher, batches
        gc.collect()
    assert [int(batch[0]) for batch in moved] == [0, 1]


def test_each_pass_comes_after_what_the_loop_had_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    prefetcher, device, _ = late_prefetcher(monkeypatch, arrays())
    list(prefetcher)
    list(prefetcher)
    first, second = (number for number, entry in enumerate(device.log) if entry == "catch up")
    first_after = next(entry for entry in device.log[second:] if entry.startswith("copy"))
    assert (first, first_after) == (0, f"copy {NUM_BATCHES}")


def test_an_iterator_that_its_source_uses_again_begins_anew() -> None:
    source: Any = DataLoader(list(range(12)), 2, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    prefetcher = DevicePrefetcher(source, "cpu")
    for _ in range(2):
        batches = iter(prefetcher)
        assert next(batches).tolist() == [0, 1]
        assert next(batches).tolist() == [2, 3]
    assert [batch.tolist() for batch in prefetcher] == [[first, first + 1] for first in range(0, 12, 2)]


def test_an_iterator_that_is_dropped_takes_that_of_the_source_along() -> None:
    source = Counted()
    prefetcher = DevicePrefetcher(source, "cpu")
    inner: list[Any] = []
    make = source.__iter__

    class Remembering(Counted):
        def __iter__(self) -> Iterator[Any]:
            made = make()
            inner.append(weakref.ref(made))
            return made

    prefetcher = DevicePrefetcher(Remembering(), "cpu")
    for _ in prefetcher:
        break
    assert inner[0]() is None, "workers of a pass that nobody goes on with would stay"
    assert prefetcher.state_dict() == {"nested": {"given": 0}}


def test_dropping_it_drops_the_source_at_once() -> None:
    source = Counted()
    prefetcher = DevicePrefetcher(source, "cpu")
    batches = iter(prefetcher)
    next(batches)
    gone = weakref.ref(source)
    gc.disable()
    try:
        del source, prefetcher, batches
        assert gone() is None, "a cycle keeps it, and the processes it may have"
    finally:
        gc.enable()


def test_a_source_that_is_its_own_iterator_goes_on_after_a_break() -> None:
    prefetcher = DevicePrefetcher((torch.tensor(number) for number in range(NUM_BATCHES)), "cpu")
    assert int(next(iter(prefetcher))) == 0
    assert int(next(iter(prefetcher))) == 1
    assert numbers(prefetcher) == [2, 3, 4, 5]
    assert numbers(prefetcher) == []


def test_what_frameworks_ask_for_is_the_source_s() -> None:
    loader: Any = DataLoader(list(range(8)), 2)  # type: ignore[arg-type]
    prefetcher = DevicePrefetcher(loader, "cpu")
    assert len(prefetcher) == 4
    for name in ("dataset", "sampler", "batch_sampler", "batch_size"):
        assert getattr(prefetcher, name) is getattr(loader, name)
    assert prefetcher.source is loader
    bare = DevicePrefetcher(iter([]), "cpu")
    with pytest.raises(TypeError, match="has no len"):
        len(bare)
    assert not hasattr(bare, "sampler")
    assert list(bare) == []


def test_an_error_comes_where_its_batch_would_have_come_and_stays() -> None:
    def source() -> Iterator[Any]:
        yield from (torch.tensor(0), torch.tensor(1))
        raise ValueError("the disk is gone")

    batches = iter(DevicePrefetcher(source(), "cpu", max_nb_batch_on_device=5))
    assert [int(next(batches)), int(next(batches))] == [0, 1]
    for _ in range(2):
        with pytest.raises(ValueError, match="the disk is gone"):
            next(batches)

    def move(batch: Any, _: Any) -> Any:
        if int(batch) == 2:
            raise StopIteration
        return batch

    batches = iter(DevicePrefetcher([torch.tensor(number) for number in range(4)], "cpu", move))
    assert [int(next(batches)), int(next(batches))] == [0, 1]
    with pytest.raises(RuntimeError, match="to_device raised StopIteration"):
        next(batches)


def test_a_ctrl_c_while_a_batch_is_moved_loses_nothing() -> None:
    interrupts = [1, 3]

    def move(batch: Any, _: Any) -> Any:
        if interrupts and int(batch) == interrupts[0]:
            interrupts.pop(0)
            raise KeyboardInterrupt
        return batch

    batches = iter(DevicePrefetcher([torch.tensor(number) for number in range(5)], "cpu", move))
    found: list[int] = []
    while len(found) < 5:
        try:
            found.append(int(next(batches)))
        except KeyboardInterrupt:
            continue
    assert found == list(range(5))
    assert not interrupts


def test_what_the_handler_of_a_signal_raises_is_no_error_of_the_batch() -> None:
    def handle(*_: object) -> None:
        raise ValueError("of the handler")

    def move(batch: Any, _: Any) -> Any:
        if int(batch) == 2 and not interrupted:
            interrupted.append(True)
            signal.raise_signal(signal.SIGUSR1)
        return batch

    interrupted: list[bool] = []
    batches = iter(
        DevicePrefetcher([torch.tensor(number) for number in range(6)], "cpu", move, max_nb_batch_on_device=3)
    )
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(ValueError, match="of the handler"):
            next(batches)
        assert [int(batch) for batch in batches] == list(range(6))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_keys_follow_from_seed_epoch_and_step() -> None:
    def keys(seed: int | None, epoch: int | None = None) -> list[int]:
        prefetcher = DevicePrefetcher(arrays(), "cpu", lambda *_: batch_key(), seed=seed)
        if epoch is not None:
            prefetcher.set_epoch(epoch)
        return [*prefetcher, *prefetcher]

    assert keys(3) == keys(3)
    assert len({*keys(3), *keys(4)}) == 4 * NUM_BATCHES
    assert keys(3, epoch=1)[:NUM_BATCHES] == keys(3)[NUM_BATCHES:]
    torch.manual_seed(11)
    by_torch, before = keys(None), torch.get_rng_state()
    assert keys(None) == by_torch == keys(11)
    assert torch.equal(torch.get_rng_state(), before), "the user's generator was drawn from"


def test_a_source_that_knows_its_place_gives_the_keys() -> None:
    class Keyed:
        def __init__(self) -> None:
            self.key = 0

        def __iter__(self) -> Iterator[int]:
            for self.key in (70, 71, 72):
                yield self.key

        def device_key(self) -> int:
            return self.key

    assert list(DevicePrefetcher(Keyed(), "cpu", lambda *_: batch_key(), max_nb_batch_on_device=2)) == [70, 71, 72]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"iterable": 3}, TypeError, "a int can't be iterated over"),
        ({"to_device": 3}, TypeError, "to_device is a int"),
        ({"max_nb_batch_on_device": 0}, ValueError, "max_nb_batch_on_device=0 is too small"),
        ({"seed": "x"}, TypeError, "seed='x' is a str"),
        ({"dtype": torch.int8}, TypeError, "isn't a floating-point dtype"),
        ({"device": "gpu"}, ValueError, "device='gpu' is unknown to torch"),
        ({"device": "cuda:99"}, RuntimeError, "device='cuda:99', but torch finds . cuda devices; give "),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        DevicePrefetcher(**{"iterable": [], "device": "cpu", **arguments})


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_an_accelerator_the_cpu_is_the_device() -> None:
    assert DevicePrefetcher([]).device == torch.device("cpu")
