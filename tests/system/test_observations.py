"""What is measured of real loaders: in processes, threads and the loop's thread."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from swift_loader import DataLoader, SwiftLoader
from swift_loader.metrics.observations import Observations
from tests.support.helpers import exhaustive_unless

SAMPLE_S = 0.001
SLOW_S = 0.25
SLOW_INDEX = 17
NUM_SAMPLES = 96
BATCH_SIZE = 8
NUM_BATCHES = NUM_SAMPLES // BATCH_SIZE


class Sleeping:
    """Samples that take a known time. One of them takes long."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        time.sleep(SLOW_S if index == SLOW_INDEX else SAMPLE_S)
        return np.full(16, index, np.float32)


class SleepingStream(IterableDataset[Any]):
    """A stream of such samples."""

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        for index in range(NUM_SAMPLES):
            time.sleep(SAMPLE_S)
            yield np.full(16, index, np.float32)


class Dying(Sleeping):
    """Kills its worker once, in step 1: later samples may come first in the next epoch, which is built ahead."""

    def __init__(self, marker: str) -> None:
        self._marker = marker

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        if index == 5 and not os.path.exists(self._marker):  # noqa: PTH110 - imported in a worker
            os.close(os.open(self._marker, os.O_CREAT))
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full(16, index, np.float32)


KINDS: dict[str, dict[str, Any]] = {
    "process": {"worker_per_consumer": 2},
    "thread": {"worker_per_consumer": 2, "worker_type": "thread"},
    "inline": {"worker_per_consumer": 0},
}


of_each_kind = pytest.mark.parametrize("kind", exhaustive_unless(["process", "thread", "inline"], KINDS))


def observe_swift(loop: Callable[[SwiftLoader], object], dataset: Any = None, **options: Any) -> Observations:
    """Return what was measured of a loader while `loop` used it."""
    dataset = Sleeping() if dataset is None else dataset
    with SwiftLoader(dataset=dataset, batch_size=BATCH_SIZE, **{"seed": 3, **options}) as loader:
        loop(loader)
        assert loader._session is not None
        return loader._session.observer.observations(loader._session)


def run_epochs(number: int) -> Callable[[Any], None]:
    def loop(loader: Any) -> None:
        for _ in range(number):
            for _ in loader:
                pass

    return loop


@cache
def two_epochs(kind: str) -> Observations:
    """Return what was measured of a loader of a kind in two epochs. Each process makes them once."""
    return observe_swift(run_epochs(2), **KINDS[kind])


def check_order(batches: NDArray[np.void]) -> None:
    """Check that the readings of each batch, in two processes, are in the order of its life."""
    built = batches["began_ns"] + batches["fetch_ns"] + batches["collate_ns"] + batches["encode_ns"]
    assert (batches["sent_ns"] > 0).all()
    assert (batches["sent_ns"] <= batches["began_ns"]).all()
    assert (built <= batches["received_ns"]).all()
    assert (batches["received_ns"] + batches["decode_ns"] <= batches["delivered_ns"]).all()
    assert (batches["asked_ns"] < batches["delivered_ns"]).all()
    assert (batches["asked_ns"][1:] >= batches["delivered_ns"][:-1]).all()


@of_each_kind
def test_the_life_of_each_batch_is_measured(kind: str) -> None:
    observed = two_epochs(kind)
    batches = observed.batches
    check_order(batches)
    assert list(zip(batches["epoch"].tolist(), batches["step"].tolist(), strict=True)) == [
        (epoch, step) for epoch in range(2) for step in range(NUM_BATCHES)
    ]
    assert (batches["num_samples"] == BATCH_SIZE).all()
    assert (batches["nbytes"] >= BATCH_SIZE * 64).all()
    assert set(batches["worker_id"].tolist()) <= set(range(max(1, observed.setup.num_workers)))
    assert (observed.num_delivered, observed.num_samples) == (2 * NUM_BATCHES, 2 * NUM_SAMPLES)
    assert observed.num_restarts == 0


@of_each_kind
def test_known_sleeps_show_in_the_times(kind: str) -> None:
    observed = two_epochs(kind)
    slept_s = 2 * ((NUM_SAMPLES - 1) * SAMPLE_S + SLOW_S)
    fetched_s = observed.batches["fetch_ns"].sum() / 1e9
    assert slept_s <= fetched_s < 20 * slept_s
    cpu_s = observed.batches["cpu_ns"].sum() / 1e9
    assert 0 < cpu_s < fetched_s
    waits_ns = observed.batches["delivered_ns"] - observed.batches["asked_ns"]
    assert observed.waited_s == pytest.approx(waits_ns.sum() / 1e9)
    assert observed.waited_s <= observed.elapsed_s
    assert 0 < observed.trainer_cpu_s < 4 * observed.elapsed_s


@of_each_kind
def test_a_slow_sample_is_named_by_its_index(kind: str) -> None:
    slowest = two_epochs(kind).slowest
    assert len({slow.index for slow in slowest}) == len(slowest) <= 20
    times = {slow.index: slow.seconds for slow in slowest}
    assert times[SLOW_INDEX] >= SLOW_S
    assert [slow.seconds for slow in slowest] == sorted(times.values(), reverse=True)


@of_each_kind
def test_nothing_is_measured_with_benchmark_off(kind: str) -> None:
    observed = observe_swift(run_epochs(1), benchmark=False, **KINDS[kind])
    assert len(observed.batches) == observed.num_delivered == observed.elapsed_s == observed.waited_s == 0
    assert observed.slowest == ()


@pytest.mark.parametrize("has_device", [False, True])
def test_time_between_two_epochs_does_not_count(has_device: bool) -> None:
    pause_s, passes_s = 0.6, []

    def loop(loader: SwiftLoader) -> None:
        loader.start(device="cpu" if has_device else None)
        for stop in (NUM_BATCHES, 2, NUM_BATCHES):  # the loop leaves the second epoch
            began_s = time.perf_counter()
            for number, _ in enumerate(loader, 1):
                if number == stop:
                    ended_s = time.perf_counter()
                    if stop < NUM_BATCHES:
                        break
            passes_s.append((ended_s if stop < NUM_BATCHES else time.perf_counter()) - began_s)
            time.sleep(pause_s)

    observed = observe_swift(loop, worker_per_consumer=1)
    assert 0.5 * sum(passes_s) <= observed.elapsed_s <= sum(passes_s)
    assert (observed.batches["copy_ns"] > 0).all() == has_device
    assert observed.setup.has_device == has_device


def test_the_step_after_the_last_batch_counts() -> None:
    step_s = 0.3

    def loop(loader: SwiftLoader) -> None:
        for number, _ in enumerate(loader, 1):
            if number == NUM_BATCHES:
                time.sleep(step_s)

    observed = observe_swift(loop, worker_per_consumer=0)
    assert observed.elapsed_s >= observed.waited_s + step_s


def test_a_worker_that_was_replaced_counts(tmp_path: Any) -> None:
    with pytest.warns(match="SIGKILL"):
        observed = observe_swift(run_epochs(1), Dying(str(tmp_path / "died")), worker_per_consumer=2, validate=False)
    assert observed.num_restarts == 1
    assert observed.batches["step"].tolist() == list(range(NUM_BATCHES))
    check_order(observed.batches)


@of_each_kind
def test_batches_that_are_dropped_leave_the_others_right(kind: str) -> None:
    """Each row has the fetching time of its own batch: the slow sample is in one batch of each epoch."""
    got: list[tuple[int, int, bool]] = []

    def take(loader: SwiftLoader, epoch: int, stop: int) -> None:
        loader.set_epoch(epoch)
        for step, batch in enumerate(loader):
            got.append((epoch, step, SLOW_INDEX in np.asarray(batch)[:, 0]))
            if step + 1 == stop:
                return

    def loop(loader: SwiftLoader) -> None:
        take(loader, 0, 3)
        take(loader, 5, NUM_BATCHES)
        state = loader.state_dict()
        take(loader, 2, 5)
        loader.load_state_dict(state)
        take(loader, 7, NUM_BATCHES)

    observed = observe_swift(loop, data_queue_size=6 if kind != "inline" else None, **KINDS[kind])
    batches = observed.batches
    assert [tuple(row) for row in batches[["epoch", "step"]].tolist()] == [(epoch, step) for epoch, step, _ in got]
    assert all(row["fetch_ns"] >= SLOW_S * 1e9 for row, (_, _, is_slow) in zip(batches, got, strict=True) if is_slow)
    quick = [row["fetch_ns"] for row, (_, _, is_slow) in zip(batches, got, strict=True) if not is_slow]
    assert np.median(quick) < SLOW_S * 1e9
    check_order(batches)


def test_order_does_not_matter_for_the_matching() -> None:
    def loop(loader: SwiftLoader) -> None:
        seen.extend(int(np.asarray(batch)[0, 0]) // BATCH_SIZE for batch in loader)

    seen: list[int] = []
    observed = observe_swift(loop, worker_per_consumer=2, in_order=False, shuffle=False)
    assert observed.batches["step"].tolist() == seen
    assert sorted(seen) == list(range(NUM_BATCHES))


# The drop-in class

LOADERS: dict[str, dict[str, Any]] = {
    "process": {"num_workers": 2},
    "thread": {"num_workers": 1, "worker_type": "thread"},
    "inline": {"num_workers": 0},
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("is_stream", [False, True], ids=["map", "stream"])
def test_a_dataloader_measures_all_its_epochs(kind: str, is_stream: bool) -> None:
    options: dict[str, Any] = {"shard_stream": True} if is_stream and kind != "thread" else {}
    dataset: Any = SleepingStream() if is_stream else Sleeping()
    loader = DataLoader(dataset, BATCH_SIZE, **LOADERS[kind], **options)
    run_epochs(2)(loader)
    observed = loader._observer.observations(loader)
    check_order(observed.batches)
    assert observed.batches["epoch"].tolist() == [0] * NUM_BATCHES + [1] * NUM_BATCHES
    assert observed.num_samples == 2 * NUM_SAMPLES
    slept_s = 2 * NUM_SAMPLES * SAMPLE_S
    assert slept_s <= observed.batches["fetch_ns"].sum() / 1e9 < 20 * slept_s
    assert observed.waited_s <= observed.elapsed_s
    indices = [slow.index for slow in observed.slowest]
    assert (SLOW_INDEX in indices) == (not is_stream and kind != "inline")
    assert observed.setup.num_workers == LOADERS[kind]["num_workers"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_pause_after_an_epoch_of_a_dataloader_does_not_count(num_workers: int) -> None:
    dataset: Any = Sleeping()
    loader, pause_s, passes_s = DataLoader(dataset, BATCH_SIZE, num_workers=num_workers), 1.0, 0.0
    for stop in (NUM_BATCHES, 2):
        began_s = time.perf_counter()
        for number, _ in enumerate(loader, 1):
            if number == stop < NUM_BATCHES:
                break
        passes_s += time.perf_counter() - began_s
        time.sleep(pause_s)
    next(iter(loader))
    assert loader._observer.observations(loader).elapsed_s <= passes_s + 0.9 * pause_s
