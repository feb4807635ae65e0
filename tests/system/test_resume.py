"""Runs that are stopped and go on in another loader: what the model sees is what it would have seen."""

from __future__ import annotations

import functools
import json
import pickle
import tracemalloc
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader import LoaderClosed, StateMismatch, SwiftLoader
from swift_loader.sampling.shuffle import Order, OrderSettings
from tests.support import datasets
from tests.support.helpers import (
    START_METHOD,
    exhaustive,
    exhaustive_unless,
    ids_of,
    make_loader,
    needs_own_generators,
    slow,
)


def through_json(state: dict[str, int]) -> dict[str, int]:
    restored: dict[str, int] = json.loads(json.dumps(state))
    return restored


@dataclass(frozen=True)
class Stretch:
    """What one set of loaders does before the run is stopped."""

    batch_size: int
    world_size: int
    uneven: Any
    drop_last: bool
    num_steps: int
    """Global steps, over the ends of epochs."""
    workers: int = 0


stretches = st.builds(
    Stretch,
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 4),
    uneven=st.sampled_from(["pad", "drop", "exact"]),
    drop_last=st.booleans(),
    num_steps=st.integers(0, 12),
)


class Ranks:
    """The loaders of all ranks, driven in step, as a training run drives them."""

    def __init__(self, stack: ExitStack, num_samples: int, stretch: Stretch, **options: Any) -> None:
        self.loaders = []
        self.iterators: list[Any] = []
        for _ in range(stretch.world_size):
            loader = SwiftLoader(
                dataset=range(num_samples),
                batch_size=stretch.batch_size,
                nb_consumer=stretch.world_size,
                worker_per_consumer=stretch.workers,
                uneven=stretch.uneven,
                drop_last=stretch.drop_last,
                benchmark=False,
                start_method=START_METHOD,
                **options,
            )
            self.loaders.append(stack.enter_context(loader))

    def load(self, state: dict[str, int]) -> None:
        for loader in self.loaders:
            loader.load_state_dict(state)

    def start(self) -> None:
        for rank, loader in enumerate(self.loaders):
            loader.start(rank)

    def state(self) -> dict[str, int]:
        """The state, which must be the same on all ranks."""
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        return through_json(states[0])

    def step(self) -> list[int] | None:
        """The samples of one global step without padding, in the order of the ranks; None at an epoch's end."""
        if not self.iterators:
            self.iterators = [iter(loader) for loader in self.loaders]
        found: list[int] = []
        num_batches = 0
        for loader, iterator in zip(self.loaders, self.iterators, strict=True):
            batch = next(iterator, None)
            if batch is not None:
                num_batches += 1
                samples = np.asarray(batch).tolist()
                assert samples == loader.batch_indices.tolist()
                found += samples[: len(samples) - loader.num_padding]
        if not num_batches:
            self.iterators = []
            return None
        return found


def epochs_seen(num_samples: int, chain: list[Stretch], **options: Any) -> tuple[list[list[int]], list[Stretch]]:
    """Return the samples of each epoch of a run that is stopped after each stretch, and who finished each epoch."""
    epochs: list[list[int]] = [[]]
    finishers: list[Stretch] = []
    state = None
    for stretch in chain:
        with ExitStack() as stack:
            ranks = Ranks(stack, num_samples, stretch, **options)
            if state is not None:
                ranks.load(state)
                assert ranks.state() == state, "a state taken right after it was loaded is another one"
            ranks.start()
            num_done = 0
            while num_done < stretch.num_steps:
                samples = ranks.step()
                if samples is None:
                    epochs.append([])
                    finishers.append(stretch)
                    num_done += not epochs[-2]  # an empty epoch counts, or this would never end
                else:
                    epochs[-1] += samples
                    num_done += 1
            state = ranks.state()
            if state["position"] == num_samples and len(epochs) <= state["epoch"] + 1:
                epochs.append([])  # stopped at the very end: the next loader begins the next epoch
                finishers.append(stretch)
    return epochs, finishers


def check_chain(num_samples: int, chain: list[Stretch], **options: Any) -> None:
    epochs, finishers = epochs_seen(num_samples, chain, **options)
    order = Order(
        num_samples,
        OrderSettings.of(
            seed=options["seed"],
            shuffle=options["shuffle"],
            window=options["nearby_shuffle"],
            batch_size=chain[0].batch_size,
        ),
    )
    for epoch, seen in enumerate(epochs):
        reference = order.indices(epoch, np.arange(num_samples)).tolist()
        assert seen == reference[: len(seen)]
        if epoch < len(finishers):
            finisher = finishers[epoch]
            missing = num_samples - len(seen)
            if finisher.drop_last:
                assert missing < finisher.batch_size * finisher.world_size
            elif finisher.uneven == "drop":
                assert missing < finisher.world_size
            else:
                assert missing == 0


orders = st.fixed_dictionaries(
    {
        "shuffle": st.booleans(),
        "nearby_shuffle": st.sampled_from([0, 1, 7, 20, 100]),
        "seed": st.integers(0, 2**64),
    }
)


with_threads = st.builds(replace, stretches, workers=st.integers(1, 3))


@pytest.mark.parametrize(
    ("stretch", "options"),
    [(stretches, {}), slow(with_threads, {"worker_type": "thread"})],
    ids=["no workers", "threads"],
)
@given(data=st.data(), num_samples=st.integers(1, 60), order=orders)
@settings(max_examples=40, deadline=None)
def test_a_chain_of_stopped_runs_sees_what_one_run_sees(
    stretch: Any, options: dict[str, Any], data: st.DataObject, num_samples: int, order: dict[str, Any]
) -> None:
    check_chain(num_samples, data.draw(st.lists(stretch, min_size=1, max_size=5)), **options, **order)


@pytest.mark.parametrize("seed", exhaustive_unless({0}, range(4)))
def test_a_chain_of_stopped_runs_sees_what_one_run_sees_with_processes(seed: int) -> None:
    generator = np.random.default_rng(seed)
    chain = [
        Stretch(
            batch_size=int(generator.integers(1, 20)),
            world_size=int(generator.integers(1, 3)),
            uneven="exact" if seed % 2 else "pad",
            drop_last=False,
            num_steps=int(generator.integers(0, 30)),
            workers=int(generator.choice([1, 2, 4])),
        )
        for _ in range(3)
    ]
    check_chain(203, chain, shuffle=True, nearby_shuffle=int(generator.choice([0, 30])), seed=seed)


def samples_of(batch: Any) -> list[bytes]:
    """The bytes of each sample of a batch."""
    return [
        pickle.dumps({key: np.asarray(values[i]).tobytes() for key, values in batch.items()})
        for i in range(len(batch["id"]))
    ]


@needs_own_generators
@pytest.mark.parametrize(
    ("workers", "batch_size"), [(0, 8), (0, 5), exhaustive(1, 8), exhaustive(1, 5), exhaustive(2, 8), (2, 5)]
)
def test_augmentations_are_the_same_bytes_after_a_resume(workers: int, batch_size: int) -> None:
    with make_loader(datasets.AugmentingWithAll, workers=0) as loader:
        reference = [sample for _ in range(3) for batch in loader for sample in samples_of(batch)]
    with make_loader(datasets.AugmentingWithAll, workers=0) as loader:
        iterator = iter(loader)
        for _ in range(4):
            next(iterator)
        state = through_json(loader.state_dict())
    with make_loader(datasets.AugmentingWithAll, workers=workers, batch_size=batch_size) as loader:
        loader.load_state_dict(state)
        rest = [sample for _ in range(3) for batch in loader for sample in samples_of(batch)]
    assert rest[: len(reference) - 32] == reference[32:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_was_begun_with_another_default_goes_on_in_its_order(workers: int) -> None:
    """The first release's default was a window of five batches, in runs of four."""
    saved = {"version": 1, "seed": 7, "epoch": 1, "position": 48, "shuffle": 1, "nearby_shuffle": 40, "run_length": 4}
    order = Order(100, OrderSettings(7, shuffle=True, window=40, run_length=4))
    with make_loader(datasets.Counting, workers=workers) as loader:
        loader.load_state_dict({**saved, "num_samples": 100})
        assert ids_of(loader) == order.indices(1, np.arange(48, 100)).tolist()
        assert ids_of(loader) == order.indices(2, np.arange(100)).tolist()
        assert loader.state_dict().items() >= {**saved, "epoch": 2, "position": 100, "num_samples": 100}.items()


def test_the_state_is_plain_integers_and_says_where_the_loop_is() -> None:
    with make_loader(datasets.Counting, workers=2, nearby_shuffle=20) as loader:
        assert loader.state_dict() == {
            "version": 1, "seed": 7, "epoch": 0, "position": 0, "shuffle": 1, "nearby_shuffle": 20, "run_length": 2,
            "num_samples": None, "skipped": [], "excluded": [],
        }  # fmt: skip
        places = []
        for number, _ in enumerate(loader):
            assert all(type(value) in {int, list} for value in loader.state_dict().values())
            places.append(loader.state_dict()["position"])
            if number == 5:
                break
        assert places == [8, 16, 24, 32, 40, 48]
        state = loader.state_dict()
        assert (state["epoch"], state["position"], state["num_samples"]) == (0, 48, 100)
        list(loader)
        state = loader.state_dict()
        assert (state["epoch"], state["position"]) == (1, 100)


def test_an_epoch_that_is_chosen_in_the_midst_of_another_one_is_in_the_state() -> None:
    def place() -> tuple[int, int]:
        state = loader.state_dict()
        return state["epoch"], state["position"]

    with make_loader(datasets.Counting, workers=0) as loader:
        iterator = iter(loader)
        next(iterator)
        loader.set_epoch(0)  # some frameworks say it again
        assert place() == (0, 8)
        assert len(list(iterator)) == 12
        next(iter(loader))
        assert place() == (1, 8)
        loader.set_epoch(5)
        assert place() == (5, 0)
        list(loader)
        assert place() == (5, 100)


def test_asking_for_the_state_starts_nothing() -> None:
    loader = make_loader(datasets.FailsToBuild)
    state = loader.state_dict()
    other = make_loader(datasets.FailsToBuild)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert "not started" in repr(loader)
    assert "not started" in repr(other)


def test_what_is_prefetched_does_not_count() -> None:
    with make_loader(datasets.Counting) as loader:
        loader.start(0, device="cpu")
        iterator = iter(loader)
        next(iterator)
        assert loader.state_dict()["position"] == 8


@pytest.mark.parametrize("chosen", [None, exhaustive(0), exhaustive(1)])
def test_a_state_from_the_end_of_an_epoch_goes_on_with_the_next_one(chosen: int | None) -> None:
    with make_loader(datasets.Counting) as loader:
        epochs = [ids_of(loader) for _ in range(3)]
    with make_loader(datasets.Counting) as loader:
        iterator = iter(loader)
        for _ in range(len(loader)):  # and not to StopIteration
            next(iterator)
        state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (0, 100)
    with make_loader(datasets.Counting) as loader:
        loader.load_state_dict(state)
        if chosen is not None:
            loader.sampler.set_epoch(chosen)
        assert loader.state_dict() == (state if chosen != 1 else {**state, "epoch": 1, "position": 0})
        seen = [ids_of(loader) for _ in range(2)]
    assert seen == ([[], epochs[1]] if chosen == 0 else epochs[1:])


@pytest.mark.parametrize("when", ["after load", exhaustive("before load"), exhaustive("after iter")])
@pytest.mark.parametrize("chosen", [0, exhaustive(2)])
def test_a_restored_position_counts_in_its_own_epoch_only(when: str, chosen: int) -> None:
    with make_loader(datasets.Counting) as loader:
        epochs = [ids_of(loader) for _ in range(4)]
    with make_loader(datasets.Counting) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with make_loader(datasets.Counting) as loader:
        if when == "before load":
            loader.set_epoch(chosen)
        loader.load_state_dict(state)
        if when == "after load":
            loader.set_epoch(chosen)
        iterator = iter(loader)
        if when == "after iter":
            loader.set_epoch(chosen)
        stays = chosen == 0 or when == "before load"
        assert ids_of(iterator) == (epochs[0][8:] if stays else epochs[2])
        assert ids_of(loader) == (epochs[1] if stays else epochs[3])


def test_iterators_thrown_away_after_a_load_cost_nothing() -> None:
    with make_loader(datasets.Counting) as loader:
        whole = ids_of(loader)
        state = {**loader.state_dict(), "position": 24}
    with make_loader(datasets.Counting) as loader:
        loader.load_state_dict(state)
        iter(loader)
        iter(loader)
        loader.set_epoch(0)
        assert loader.state_dict() == state
        assert ids_of(loader) == whole[24:]


@pytest.mark.parametrize("workers", [0, exhaustive(2)])
def test_a_running_loader_takes_over_the_seed_of_a_state(workers: int) -> None:
    with make_loader(datasets.AugmentingWithAll, workers=0, seed=12345) as loader:
        state = loader.state_dict()
        reference = [samples_of(batch) for batch in loader]
    with make_loader(datasets.AugmentingWithAll, seed=None, workers=workers) as loader:
        loader.start(0)
        loader.load_state_dict(state)
        assert [samples_of(batch) for batch in loader] == reference


def test_loading_very_often_never_waits_for_a_busy_worker() -> None:
    with make_loader(datasets.Slow, workers=1, kwargs={"seconds": 0.5}, batch_size=1, validate=False) as loader:
        loader.start(0)
        state = loader.state_dict()
        for number in range(1000):  # for which the worker would need 500 s
            loader.load_state_dict(state | {"position": number % 100, "epoch": number})
        expected = list(loader.sampler)[99]
        assert next(iter(loader))["id"].tolist() == [expected]


@pytest.mark.parametrize(("batch_size", "num_before", "num_left", "num_next"), [(8, 5, 8, 13), (7, 5, 9, 15)])
def test_the_length_counts_what_was_delivered_before_in_batches_of_the_present_size(
    batch_size: int, num_before: int, num_left: int, num_next: int
) -> None:
    with make_loader(datasets.Counting) as loader:
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        state = loader.state_dict()
        assert (len(loader), len(iterator)) == (13, 8)
    with make_loader(datasets.Counting, batch_size=batch_size) as loader:
        loader.load_state_dict(state)
        assert len(loader) == num_before + num_left
        iterator = iter(loader)
        next(iterator)
        assert (len(loader), len(iterator)) == (num_before + num_left, num_left - 1)
        assert len(list(iterator)) == num_left - 1
        assert len(loader) == num_next


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 8}, r"seed=8, but this loader was given seed=7"),
        ({"shuffle": 0}, r"shuffle=0, but this loader was given shuffle=1"),
        ({"nearby_shuffle": 41}, r"nearby_shuffle=41, but this loader was given nearby_shuffle=20"),
        ({"num_samples": 99}, r"num_samples=99, but the dataset now has num_samples=100"),
    ],
)
@pytest.mark.parametrize("is_started", [False, exhaustive(True)])
def test_a_state_of_another_run_is_refused_by_name_and_values(
    changed: dict[str, int], message: str, is_started: bool
) -> None:
    with make_loader(datasets.Counting, nearby_shuffle=20) as loader:
        reference = ids_of(loader)
        state = loader.state_dict() | changed
    with make_loader(datasets.Counting, nearby_shuffle=20) as loader:
        if is_started:
            loader.start(0)
        state["position"] = 8
        if "num_samples" in changed and not is_started:  # the dataset's length is known only when it stands
            loader.load_state_dict(state)
            refused = functools.partial(loader.start, 0)
        else:
            refused = functools.partial(loader.load_state_dict, state)
        with pytest.raises(StateMismatch, match=message):
            refused()
        if is_started:
            assert ids_of(loader) == reference, "a state that was refused has changed something"


def test_a_resume_at_sample_1e9_goes_through_nothing_before_it() -> None:
    position = 10**9 + 32
    with SwiftLoader(dataset=range(2 * 10**9), batch_size=32, worker_per_consumer=0, seed=1) as loader:
        next(iter(loader))  # what is allocated once, on first use
        state = loader.state_dict() | {"position": position}
        tracemalloc.start()
        try:
            loader.load_state_dict(state)
            next(iter(loader))
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert loader.state_dict()["position"] == position + 32
    assert peak_bytes < 1 << 20


def test_in_completion_order_a_state_can_be_taken_between_epochs_only() -> None:
    with make_loader(datasets.Counting, in_order=False) as loader:
        assert loader.state_dict()["position"] == 0
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(RuntimeError, match="in_order=False"):
            loader.state_dict()
        list(iterator)
        assert loader.state_dict()["position"] == 100


def test_in_completion_order_a_state_is_not_mistaken_for_a_count() -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": False, "in_order": False, "data_queue_size": 4}
    with make_loader(datasets.SlowAt, validate=False, **options) as loader:
        iterator = iter(loader)
        state = loader.state_dict()
        first, second = next(iterator), next(iterator)  # the batch with the slow sample isn't among them
        assert 0 not in ids_of([first, second])
        loader.load_state_dict(state | {"position": 8})
        assert sorted(ids_of(loader)) == list(range(8, 100))


def test_states_can_be_loaded_one_after_the_other() -> None:
    with make_loader(datasets.Counting, workers=0, seed=None) as loader:
        state = loader.state_dict()
        for seed in (1, 2, 2**64):
            loader.load_state_dict(state | {"seed": seed, "position": 8})
            assert loader.state_dict()["seed"] == seed
            assert len(ids_of(loader)) == 92


def test_a_position_beyond_the_dataset_is_refused_when_its_length_is_known() -> None:
    with make_loader(datasets.Counting, workers=0) as loader:
        loader.load_state_dict(loader.state_dict() | {"position": 1000})
        with pytest.raises(StateMismatch, match="position=1000, but the dataset now has num_samples=100"):
            loader.start(0)


def test_a_loader_with_a_state_can_be_pickled_before_it_starts() -> None:
    with make_loader(datasets.Counting) as loader:
        whole = ids_of(loader)
        state = {**loader.state_dict(), "position": 24}
    loader = make_loader(datasets.Counting)
    loader.load_state_dict(state)
    with pickle.loads(pickle.dumps(loader)) as twin:
        assert ids_of(twin) == whole[24:]


def test_a_closed_loader_takes_no_state() -> None:
    loader = make_loader(datasets.Counting)
    state = loader.state_dict()
    loader.close()
    assert loader.state_dict() == state
    with pytest.raises(LoaderClosed):
        loader.load_state_dict(state)


def test_the_sampler_tells_what_the_next_epoch_is() -> None:
    with make_loader(datasets.Counting, nb_consumer=2, uneven="drop") as loader:
        loader.start(1)
        for epoch in (0, 1):
            upcoming = list(loader.sampler)
            assert len(loader.sampler) == len(upcoming) == 50
            assert ids_of(loader) == upcoming
            loader.sampler.set_epoch(epoch + 1)
        assert loader.batch_sampler is None


def test_the_indices_of_the_last_batch_can_be_asked_for() -> None:
    with make_loader(datasets.Counting) as loader:
        assert loader.batch_indices.tolist() == []
        for batch in loader:
            assert loader.batch_indices.tolist() == batch["id"].tolist()
