"""The drop-in DataLoader with worker threads: the same as with processes, as far as threads can."""

from __future__ import annotations

import copy
import pickle
import random
import signal
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
from swift_loader.integrations import converted
from tests.support.chains import Chain, plain, run_whole, seed_all
from tests.support.helpers import exhaustive_unless, going_on_when_told, is_true_in_a_fork, wait_until
from tests.support.resumable import SAMPLED, STREAMS, Drawing
from tests.support.torch_mode import as_it_is
from tests.system.test_dataloader_faults import NUM_SAMPLES, Faulty, OwnError, end_early, fail, numbers

NUM_STOPS = 50
NUM_EPOCHS = 14

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def threaded(dataset: Any, num_workers: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, num_workers=num_workers, worker_type="thread", **{"batch_size": 4, **options})


def worker_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("swift_loader-worker")}


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


class Stateful(Faulty):
    """Counts its samples, and gives the count with each."""

    def __init__(self) -> None:
        super().__init__(-1, fail)
        self.count = 0

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return index, self.count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Numbers(IterableDataset[int]):
    """A stream of the numbers 0 to 40."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_SAMPLES))


# The same batches


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Varied, {"shuffle": True}),
        (Varied, {"shuffle": True, "collate_fn": as_it_is}),
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


def described(thing: Any) -> Any:
    """Return types, dtypes and values."""
    if isinstance(thing, torch.Tensor):
        return thing.dtype, thing.stride(), thing.tolist()
    if isinstance(thing, np.ndarray):
        return thing.dtype.str, thing.flags.writeable, thing.tolist()
    if isinstance(thing, dict):
        return {name: described(value) for name, value in thing.items()}
    return type(thing), list(map(described, thing)) if isinstance(thing, list) else thing


def test_batches_share_no_memory_with_the_dataset() -> None:
    dataset = Varied()
    before = dataset.ROWS.copy()
    for batch in threaded(dataset, collate_fn=as_it_is):
        for sample in batch:
            sample["row"][:] = -1
    assert (before == dataset.ROWS).all()


def test_out_of_order_each_batch_comes_once() -> None:
    class SlowAtFirst(Faulty):
        def __getitem__(self, index: int) -> int:
            if index == 0:
                is_late.wait(20)
            return index

    is_late = threading.Event()
    iterator = iter(threaded(SlowAtFirst(-1, fail), in_order=False))
    found = [next(iterator)]
    is_late.set()
    assert found[0].tolist() != [0, 1, 2, 3]
    assert sorted(numbers(found + list(iterator))) == list(range(NUM_SAMPLES))


def test_what_is_built_ahead_is_bounded() -> None:
    class Noting(Faulty):
        def __getitem__(self, index: int) -> int:
            fetched.append(index)
            return index

    fetched: list[int] = []
    iterator = iter(threaded(Noting(-1, fail), batch_size=1, prefetch_factor=4))
    for _ in range(10):
        next(iterator)
    wait_until(lambda: len(fetched) >= 10 + 4 * 2, "as many are built as may be")
    assert len(fetched) <= 10 + 4 * 2 + 1


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
    dataset: Any = Stateful()
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
    loader = threaded(Stateful(), num_workers=2)
    iterator = iter(loader)
    for _ in range(6):
        next(iterator)
    saved = loader.state_dict()["_snapshot"]["_worker_snapshots"]
    assert sum(saved[f"worker_{number}"]["dataset_state"]["count"] for number in range(2)) == 24


def test_a_dataset_with_a_state_that_can_not_be_copied_is_refused() -> None:
    dataset: Any = Stateful()
    dataset.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"a Stateful, can't be copied .*give it a __deepcopy__, or worker_type"):
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


def test_a_dataset_that_draws_from_the_global_generators_is_told_once() -> None:
    loader = threaded(Drawing())
    with pytest.warns(SwiftLoaderWarning) as told:
        assert [len(list(loader)) for _ in range(3)] == [26] * 3
    (warning,) = told
    assert "draws from random and numpy.random and torch's default generator" in str(warning.message)
    assert "or give worker_type='process'" in str(warning.message)
    assert warning.filename == __file__


def test_a_stream_that_draws_is_told_too() -> None:
    class Draws(Numbers):
        def __iter__(self) -> Iterator[Any]:
            return ((number, random.random()) for number in range(NUM_SAMPLES))

    with pytest.warns(SwiftLoaderWarning, match="draws from random"):
        list(threaded(Draws(), num_workers=1))


def test_with_rng_none_draws_are_not_told() -> None:
    assert len(list(threaded(Drawing(), rng=None))) == 26


def test_the_users_generators_stay_as_they_are() -> None:
    def states() -> list[Any]:
        return [random.getstate(), [list(map(str, np.random.get_state()))], torch.get_rng_state().tolist()]

    loader = threaded(Varied(), shuffle=True)
    iterator = iter(loader)
    before = states()
    for _ in iterator:
        assert states() == before


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


def test_rng_by_worker_and_pipes_are_refused() -> None:
    from torch.utils.data.datapipes.iter import IterableWrapper

    with pytest.raises(ValueError, match="rng='worker' doesn't work with worker_type='thread'"):
        threaded(Varied(), rng="worker")
    with pytest.raises(ValueError, match="doesn't work with a DataPipe"):
        threaded(IterableWrapper(range(5)), num_workers=1)


def test_without_workers_it_has_no_effect() -> None:
    assert numbers(threaded(Numbers(), num_workers=0, worker_init_fn=print)) == list(range(NUM_SAMPLES))


def test_copies_of_a_loader_have_threads_too() -> None:
    loader = threaded(Faulty(-1, fail))
    for copied in (copy.copy, lambda given: pickle.loads(pickle.dumps(given)), converted):
        iterator = iter(copied(loader))
        assert len(worker_threads()) == 2
        assert numbers(iterator) == list(range(NUM_SAMPLES))
        del iterator
        wait_until_no_worker_runs()


# What goes wrong


@pytest.mark.parametrize("at", ["sample", "collate"])
def test_the_loop_goes_on_after_an_error_of_the_user(at: str) -> None:
    def collate(samples: list[int]) -> Any:
        return torch.tensor(samples) if 9 not in samples else fail()

    options: dict[str, Any] = {"collate_fn": collate} if at == "collate" else {}
    iterator = iter(threaded(Faulty(9 if at == "sample" else -1, fail), **options))
    found = [next(iterator), next(iterator)]
    with pytest.raises(OwnError, match="from the user's code") as caught:
        next(iterator)
    assert "of 2 (rank 0, a thread)" in str(caught.value.__cause__)
    assert numbers(found + list(iterator)) == [n for n in range(NUM_SAMPLES) if n not in range(8, 12)]


def test_stop_iteration_from_a_map_style_dataset_never_ends_the_loop_early() -> None:
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        numbers(threaded(Faulty(9, end_early)))


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


def test_a_thread_that_hangs_is_told_with_its_stack() -> None:
    may_go_on = threading.Event()
    pattern = r"\(rank 0, a thread\) has been at batch 0 .*\nIts Python stack"
    with going_on_when_told(pattern, may_go_on.set) as told:
        assert numbers(threaded(Faulty(0, partial(may_go_on.wait, 60)), stall_warning=0.2)) == list(range(NUM_SAMPLES))
    assert "in __getitem__" in told[0]


def test_leaving_a_loop_does_not_wait_for_a_worker_that_hangs() -> None:
    may_go_on, hangs = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        may_go_on.wait(60)

    loader = threaded(Faulty(30, hang))
    iterator = iter(loader)
    next(iterator)
    hangs.wait(60)
    del iterator, loader
    assert worker_threads()
    may_go_on.set()
    wait_until_no_worker_runs()


# Loops that end early


@pytest.mark.parametrize("persistent", [False, True])
def test_break_and_iterate_again_gives_the_whole_epoch(persistent: bool) -> None:
    for dataset, num_workers in ((Faulty(-1, fail), 2), (Numbers(), 1)):
        loader = threaded(dataset, num_workers, persistent_workers=persistent)
        for num_taken in (1, 3):
            for step, _ in enumerate(loader):
                if step == num_taken:
                    break
        assert numbers(loader) == list(range(NUM_SAMPLES))


def test_two_iterators_at_once_are_independent() -> None:
    for dataset, num_workers in ((Faulty(-1, fail), 2), (Numbers(), 1)):
        loader = threaded(dataset, num_workers)
        whole = [batch.tolist() for batch in loader]
        pairs = [(one.tolist(), other.tolist()) for one, other in zip(loader, loader, strict=True)]
        assert pairs == [(batch, batch) for batch in whole]


def test_dropped_iterators_leave_no_threads() -> None:
    loader = threaded(Faulty(-1, fail))
    for _ in range(3):
        next(iter(loader))
    del loader
    wait_until_no_worker_runs()


def test_ctrl_c_in_the_loop_leaves_a_loader_that_works() -> None:
    loader = threaded(Faulty(-1, fail))
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    next(iterator)
    del iterator
    assert numbers(loader) == list(range(NUM_SAMPLES))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_of_the_trainer_makes_its_own_threads() -> None:
    loader = threaded(Faulty(-1, fail))
    iterator = iter(loader)
    found = [next(iterator)]
    assert is_true_in_a_fork(lambda: numbers(loader) == list(range(NUM_SAMPLES)))
    assert numbers(found + list(iterator)) == list(range(NUM_SAMPLES))
