"""The drop-in DataLoader with worker threads: the same as with processes, as far as threads can."""

from __future__ import annotations

import copy
import pickle
import random
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from swift_loader import DataLoader, SwiftLoaderWarning, WorkerDied, WorkerStalled, sample_rng
from swift_loader.dataloader.options import converted
from tests.support.chains import Chain, plain, run_whole, seed_all
from tests.support.datasets import identity
from tests.support.helpers import exhaustive_unless, wait_until
from tests.support.resumable import SAMPLED, STREAMS, Remembering
from tests.system.test_dataloader_faults import NUM_SAMPLES, Faulty, fail, numbers, worker_threads
from tests.system.test_thread_workers import described

NUM_STOPS = 50
NUM_EPOCHS = 14

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def threaded(dataset: Any, num_workers: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, num_workers=num_workers, worker_type="thread", **{"batch_size": 4, **options})


def wait_until_no_worker_runs() -> None:
    wait_until(lambda: not worker_threads(), "the threads have ended")


class Varied(Faulty):
    """Draws from `sample_rng`, and gives arrays and tensors; one of them is a view of its own memory."""

    ROWS = np.arange(4.0 * NUM_SAMPLES).reshape(NUM_SAMPLES, 4)

    def __init__(self) -> None:
        super().__init__(-1, fail)

    def __getitem__(self, index: int) -> Any:
        return {
            "index": index,
            "drawn": sample_rng().random(3),
            "row": self.ROWS[index],
            "tensor": torch.full((2, 2), index, dtype=torch.bfloat16),
            "text": str(index),
        }


class Whole(Varied):
    """Fetches a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [{"drawn": sample_rng().random(2), **self[index]} for index in indices]


class Numbers(IterableDataset[int]):
    """A stream of the numbers 0 to 40."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_SAMPLES))


# The same batches


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Varied, {"shuffle": True}),
        (Varied, {"shuffle": True, "collate_fn": identity}),
        (Whole, {"batch_sampler": [[3, 1], [7], [3, 3]]}),
        (Varied, {"batch_size": None, "sampler": [5, 2, 5]}),
    ],
    ids=["shuffled", "own collate", "__getitems__", "single samples"],
)
def test_batches_have_the_bytes_of_those_of_processes(dataset: Any, options: dict[str, Any]) -> None:
    found = []
    for num_workers, worker_type in ((2, "process"), (1, "thread"), (3, "thread")):
        torch.manual_seed(5)
        own: dict[str, Any] = {"worker_type": worker_type, "multiprocessing_context": "fork", **options}
        if "batch_sampler" not in own:
            own = {"batch_size": 4, **own}
        loader = DataLoader(dataset(), num_workers=num_workers, **own)
        found.append([repr(described(batch)) for _ in range(2) for batch in loader])
    assert found == [found[0]] * 3


# Resuming


@pytest.mark.parametrize("name", exhaustive_unless(["shuffle", "np.random", "buckets"], SAMPLED))
def test_a_sampler_continues_after_50_stops_with_other_numbers_of_threads(name: str) -> None:
    make = partial(SAMPLED[name], worker_type="thread")
    whole = run_whole(make, 1, NUM_EPOCHS)
    assert Chain(make, (0, 1, 2, 3)).run(NUM_STOPS, NUM_EPOCHS) == whole


@pytest.mark.parametrize("name", exhaustive_unless(["no state", "own iterator"], STREAMS))
def test_a_stream_continues_after_50_stops(name: str) -> None:
    make = partial(STREAMS[name], worker_type="thread")
    whole = run_whole(make, 1, NUM_EPOCHS)
    assert whole == run_whole(STREAMS[name], 0, NUM_EPOCHS)
    assert Chain(make, (1,)).run(NUM_STOPS, NUM_EPOCHS) == whole


def test_a_state_continues_in_processes_and_one_of_processes_in_threads() -> None:
    whole = run_whole(SAMPLED["shuffle"], 0, 1)
    for before, after in (("thread", "process"), ("process", "thread")):
        seed_all(0)
        loader = SAMPLED["shuffle"](2, worker_type=before)
        iterator = iter(loader)
        found = [plain(next(iterator)) for _ in range(3)]
        state = loader.state_dict()
        loader = SAMPLED["shuffle"](1, worker_type=after)
        loader.load_state_dict(state)
        assert [found + [plain(batch) for batch in loader]] == whole


def test_each_thread_has_its_own_dataset_if_that_has_a_state() -> None:
    dataset: Any = Remembering()
    found: dict[str, Any] = {}
    for worker_type in ("thread", "process"):
        options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork", "batch_size": 4}
        loader: Any = DataLoader(dataset, worker_type=worker_type, **options)
        iterator = iter(loader)
        found[worker_type] = [plain(next(iterator)) for _ in range(3)], loader.state_dict()["_snapshot"]
        resumed: Any = DataLoader(dataset, worker_type=worker_type, **options)
        resumed.load_state_dict(loader.state_dict())
        assert [plain(batch) for batch in resumed] == [plain(batch) for batch in iterator]
    assert found["thread"][0] == found["process"][0]
    assert found["thread"][1]["_worker_snapshots"] == found["process"][1]["_worker_snapshots"]
    assert dataset.count == 0


def test_the_states_of_all_threads_are_saved_under_their_numbers() -> None:
    loader = threaded(Remembering(), num_workers=2)
    iterator = iter(loader)
    for _ in range(6):
        next(iterator)
    saved = loader.state_dict()["_snapshot"]["_worker_snapshots"]
    assert sum(one["dataset_state"]["count"] for one in saved) == 24


def test_a_dataset_with_a_state_that_can_not_be_copied_is_refused() -> None:
    dataset: Any = Remembering()
    dataset.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"a Remembering, can't be copied .*give it a __deepcopy__, or worker_type"):
        iter(threaded(dataset))


def test_a_stream_that_is_changed_by_iterating_begins_anew_in_each_epoch() -> None:
    class Single(IterableDataset[int]):
        at = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            self.at += 1
            return self.at

    dataset = Single()
    loader = threaded(dataset, num_workers=1)
    for _ in range(2):
        assert next(iter(loader)).tolist() == [1, 2, 3, 4]
    assert dataset.at == 0


# Random numbers


def test_a_stream_that_draws_is_told() -> None:
    class Draws(Numbers):
        def __iter__(self) -> Iterator[Any]:
            return ((number, random.random()) for number in range(NUM_SAMPLES))

    with pytest.warns(SwiftLoaderWarning, match="draws from random"):
        list(threaded(Draws(), num_workers=1))


# What threads can't do


def test_get_worker_info_does_not_take_a_thread_for_a_worker() -> None:
    class Informed(Faulty):
        def __getitem__(self, index: int) -> bool:
            return get_worker_info() is None

    assert all(batch.all() for batch in threaded(Informed(-1, fail)))


def test_a_stream_in_several_threads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_workers=2 doesn't .* would differ from thread to thread; give num_w"):
        threaded(Numbers())
    assert numbers(threaded(Numbers(), num_workers=1)) == list(range(NUM_SAMPLES))


def test_a_worker_init_fn_of_the_user_is_refused_also_later() -> None:
    with pytest.raises(ValueError, match="worker_init_fn doesn't work with worker_type='thread'"):
        threaded(Varied(), worker_init_fn=print)
    loader = threaded(Varied())
    loader.worker_init_fn = print
    with pytest.raises(ValueError, match="worker_init_fn doesn't work with worker_type='thread'"):
        iter(loader)


def test_a_worker_init_fn_of_a_framework_only_seeds_and_is_left_out() -> None:
    init = type("Seeds", (), {"__module__": "lightning.seed", "__call__": fail})()
    assert len(list(threaded(Varied(), worker_init_fn=init))) == 11


def test_without_workers_it_has_no_effect() -> None:
    assert numbers(threaded(Numbers(), num_workers=0, worker_init_fn=print)) == list(range(NUM_SAMPLES))


def test_copies_of_a_loader_have_threads_too() -> None:
    loader = threaded(Faulty(-1, fail))
    for copied in (
        copy.copy,
        lambda given: pickle.loads(pickle.dumps(given)),
        lambda given: converted(given, DataLoader),
    ):
        iterator = iter(copied(loader))
        assert len(worker_threads()) == 2
        assert numbers(iterator) == list(range(NUM_SAMPLES))
        del iterator
        wait_until_no_worker_runs()


# What goes wrong


def test_a_thread_that_the_dataset_ends_is_a_runtime_error_and_the_next_epoch_has_new_ones() -> None:
    dataset = Faulty(18, sys.exit)
    loader = threaded(dataset)
    with pytest.raises(RuntimeError, match=r"DataLoader worker exited unexpectedly: .* was ended by Sys") as caught:
        numbers(loader)
    assert isinstance(caught.value, WorkerDied)
    dataset.at = -1
    assert numbers(loader) == list(range(NUM_SAMPLES))


def test_after_a_timeout_the_loop_may_wait_again() -> None:
    may_go_on = threading.Event()
    loader = threaded(Faulty(0, partial(may_go_on.wait, 60)), timeout=1)
    iterator = iter(loader)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"DataLoader timed out after 1 seconds: .* can't be killed") as caught:
            next(iterator)
        assert isinstance(caught.value, WorkerStalled)
    may_go_on.set()
    assert numbers(iterator) == list(range(NUM_SAMPLES))
