"""Rows that a loader leaves out from some position on: with workers that die, after a resume, and in replay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any, cast

import numpy as np
import pytest

from swift_loader import DataLoader, LoaderClosed, Mixture, ShuffleBatchSampler, ShuffleSampler, SwiftLoader
from swift_loader.replay import rebuild
from tests.support.datasets import Augmenting, Counting
from tests.support.helpers import ids_of, make_loader, worker_processes

NUM_SAMPLES = 100
FIRST, SECOND = {3, 14, 15, 92, 65, 35}, set(range(40, 60))


@pytest.fixture(scope="module")
def epochs() -> list[list[int]]:
    """The orders of three epochs."""
    with make_loader(Counting, workers=0) as loader:
        return [ids_of(list(loader)) for _ in range(3)]


def without(rows: list[int], excluded: set[int]) -> list[int]:
    return [row for row in rows if row not in excluded]


def take(batches: Iterator[Any], number: int) -> list[int]:
    return ids_of([next(batches) for _ in range(number)])


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")  # of the replacement
@pytest.mark.parametrize(("batch_size", "world_size"), [(8, 1), (5, 3)])
def test_rows_stay_out_through_kills_resumes_and_replay(
    epochs: list[list[int]], batch_size: int, world_size: int
) -> None:
    seen, batches = [], {}
    with make_loader(Augmenting, workers=2) as loader:
        passing = iter(loader)
        for step in range(6):
            if step == 3:
                loader.exclude(list(FIRST))
                worker_processes()[0].kill()
            position = loader.state_dict()["position"]
            batches[position] = next(passing)
            seen += ids_of([batches[position]])
        assert len(loader) == -(-(24 + len(without(epochs[0][24:], FIRST))) // 8)
        loader.exclude(lambda rows: (rows >= 40) & (rows < 60))
        state = json.loads(json.dumps(loader.state_dict()))
    middle = without(epochs[0][24:], FIRST)[:24]
    assert seen == epochs[0][:24] + middle
    end = epochs[0].index(middle[-1]) + 1
    assert [epoch for epoch, _, _ in state["excluded"]] == [0, 0]
    for number, (position, batch) in enumerate(batches.items()):  # before and after the first exclusion
        for place in ({"position": position}, {"step": number}):
            again = rebuild(Augmenting, state, batch_size=8, **place)
            assert (again.step, again.indices.tolist()) == (number, ids_of([batch]))
            assert all(np.array_equal(again.batch[name], batch[name]) for name in batch)
    assert rebuild(Augmenting, state, batch_size=8).step == 5, "the last one before the state"
    later: list[list[list[list[int]]]] = [[], []]
    for rank in range(world_size):
        options: dict[str, Any] = {"batch_size": batch_size, "nb_consumer": world_size, "uneven": "exact"}
        with make_loader(Augmenting, workers=1, **options) as loader:
            loader.load_state_dict(state)
            loader.start(rank)
            for epoch in later:
                epoch.append([ids_of([batch]) for batch in loader])
    for rows, epoch in zip((epochs[0][end:], epochs[1]), later, strict=True):
        steps = [rank[step] for step in range(len(epoch[0])) for rank in epoch if step < len(rank)]
        assert list(chain.from_iterable(steps)) == without(rows, FIRST | SECOND)


def test_an_exclusion_holds_for_the_next_pass_wherever_it_begins(epochs: list[list[int]]) -> None:
    with make_loader(Counting, workers=2) as loader:
        loader.exclude(5)  # before the start
        assert ids_of(list(loader)) == without(epochs[0], {5})
        loader.exclude([7])  # between epochs
        passing = iter(loader)
        assert take(passing, 2) == without(epochs[1], {5, 7})[:16]
        del passing  # left in the middle
        loader.set_epoch(1)
        loader.exclude(np.array([8]))
        assert ids_of(list(loader)) == without(epochs[1], {5, 7, 8}), "also what came before"
        state = loader.state_dict()
        loader.exclude([5, 7, 8])
        assert loader.state_dict() == state, "nothing is new"


def test_steps_of_a_mixture_can_be_skipped() -> None:
    mixture = Mixture({"a": Counting(30), "b": Counting(20)})
    orders = []
    for steps in ([], [1]):
        with SwiftLoader(dataset=mixture, batch_size=8, worker_per_consumer=2, seed=1) as loader:
            loader.skip(steps)
            orders.append([loader.batch_indices.tolist() for _ in loader])
    assert orders[1] == [orders[0][0], *orders[0][2:]]


def test_steps_are_skipped_among_what_is_left(epochs: list[list[int]]) -> None:
    with make_loader(Counting, workers=0) as loader:
        loader.exclude(FIRST)
        loader.skip([1, 10])
        left = without(epochs[0], FIRST)
        assert ids_of(list(loader)) == left[:8] + left[16:80] + left[88:]
        state = loader.state_dict()
        for step in (0, 1, 2, 11):
            assert rebuild(Counting, state, step, batch_size=8).indices.tolist() == left[8 * step : 8 * step + 8]


@pytest.mark.parametrize("change", [lambda loader: loader.exclude(3), lambda loader: loader.skip(0, epoch=1)])
def test_after_the_last_batch_of_an_epoch_its_rows_are_still_known(change: Any) -> None:
    with make_loader(Counting, workers=0) as loader:
        passing = iter(loader)
        rows = take(passing, 13)
        change(loader)
        assert loader.batch_indices.tolist() == rows[-4:]
        assert len(passing) == len(list(passing)) == 0


def test_what_cannot_be_excluded_changes_nothing(epochs: list[list[int]]) -> None:
    with make_loader(Counting, workers=0) as loader:
        passing = iter(loader)
        rows = take(passing, 2)
        wrong: list[Any] = [NUM_SAMPLES, 1.5, range(NUM_SAMPLES), lambda rows: rows >= 0, lambda _rows: 1 / 0]
        for asked in wrong:
            with pytest.raises((TypeError, ValueError, ZeroDivisionError)):
                loader.exclude(asked)
        loader.exclude([])
        assert not loader.state_dict()["excluded"]
        assert rows + ids_of(list(passing)) == epochs[0]
        with pytest.raises(ValueError, match="nothing would be left of the 100 rows"):
            loader.exclude(lambda rows: rows >= 0)
    with pytest.raises(LoaderClosed):
        loader.exclude(1)


def test_out_of_order_rows_are_excluded_between_passes(epochs: list[list[int]]) -> None:
    with make_loader(Counting, workers=2, in_order=False) as loader:
        for number, _ in enumerate(loader):
            if not number:
                with pytest.raises(RuntimeError, match="excluded in the middle of an epoch with in_order=False"):
                    loader.exclude(1)
        loader.exclude(1)
        assert sorted(ids_of(list(loader))) == sorted(without(epochs[1], {1}))


@pytest.mark.parametrize("kind", [ShuffleBatchSampler, ShuffleSampler])
def test_samplers_leave_out_what_they_or_a_loader_exclude(kind: Any) -> None:
    def make(state: Any = None) -> tuple[Any, Any]:
        sampler, dataset = kind(NUM_SAMPLES, 8, seed=4), cast("Any", Counting())
        if state is not None:
            sampler.load_state_dict(state)
        if kind is ShuffleSampler:
            return sampler, DataLoader(dataset, batch_size=8, sampler=sampler)
        return sampler, DataLoader(dataset, batch_sampler=sampler)

    order = ids_of(list(make()[1]))
    sampler, loader = make()
    sampler.exclude(list(FIRST))
    left = without(order, FIRST)
    passing = iter(loader)
    assert take(passing, 3) == left[:24]
    with pytest.raises(RuntimeError, match="while a pass is running"):
        sampler.exclude(1)
    state = loader.state_dict()
    resumed = make()[1]
    resumed.load_state_dict(state)
    assert ids_of(list(resumed)) == left[24:]
    with SwiftLoader(Counting, batch_size=8, worker_per_consumer=0, seed=4) as swift:
        passing = iter(swift)
        assert take(passing, 2) == order[:16]
        swift.exclude(FIRST)
        swift.skip(3)
        state = swift.state_dict()
    drawn = list(make(state)[0])
    rest = without(order[16:], FIRST)
    assert (drawn if kind is ShuffleSampler else list(chain.from_iterable(drawn))) == rest[:8] + rest[16:]
