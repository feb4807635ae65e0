"""Steps that a loader leaves out: in a pass, before it, and after a resume."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import pytest

from swift_loader import LoaderClosed, SwiftLoader
from tests.support.datasets import Counting
from tests.support.helpers import ids_of, make_loader, set_environ

NUM_SAMPLES = 100
BATCH_SIZE = 8
NUM_STEPS = 13


class Fragile(Counting):
    def __init__(self, bad: set[int]) -> None:
        super().__init__(NUM_SAMPLES)
        self.bad = bad

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.bad:
            raise ValueError(f"sample {index} is bad")
        return super().__getitem__(index)


def loader_of(workers: int = 0, **options: Any) -> SwiftLoader:
    return make_loader(Counting, workers=workers, batch_size=options.pop("batch_size", BATCH_SIZE), **options)


def steps_of(batches: Iterable[Any]) -> list[list[int]]:
    return [ids_of([batch]) for batch in batches]


def without(steps: list[Any], *skipped: int) -> list[Any]:
    return [samples for step, samples in enumerate(steps) if step not in skipped]


def flat(steps: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(steps))


@pytest.fixture(scope="module")
def epochs() -> list[list[list[int]]]:
    """The samples of each step of two epochs, without skips."""
    with loader_of() as loader:
        return [steps_of(loader) for _ in range(2)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_skip_before_the_start_leaves_all_other_batches_as_they_are(
    epochs: list[Any], workers: int, device: str | None
) -> None:
    with loader_of(workers) as loader:
        loader.skip([0, 3, 12])
        loader.skip(4, epoch=1)
        loader.start(0, device)
        assert len(loader) == NUM_STEPS - 3
        assert steps_of(loader) == without(epochs[0], 0, 3, 12)
        assert len(loader) == NUM_STEPS - 1
        assert steps_of(loader) == without(epochs[1], 4)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_skip_in_the_middle_of_a_pass_holds_for_the_same_pass(
    epochs: list[Any], workers: int, device: str | None
) -> None:
    seen = []
    with loader_of(workers) as loader:
        loader.start(0, device)
        batches = iter(loader)
        for step, batch in enumerate(batches):
            seen += [ids_of([batch])]
            assert loader.batch_indices.tolist() == seen[-1]
            if step == 2:
                loader.skip(np.array([3, 7]))
                loader.skip(range(2), epoch=1)
                assert (len(loader), len(batches)) == (NUM_STEPS - 2, NUM_STEPS - 2 - 3)
                assert loader.batch_indices.tolist() == seen[-1]
        assert seen == without(epochs[0], 3, 7)
        assert steps_of(loader) == without(epochs[1], 0, 1)


def test_a_skip_of_all_that_is_left_ends_the_pass(epochs: list[Any]) -> None:
    seen = []
    with loader_of(2) as loader:
        for batch in loader:
            seen += [ids_of([batch])]
            if len(seen) == 5:
                loader.skip(range(5, NUM_STEPS))
                assert loader.state_dict()["position"] == NUM_SAMPLES
        assert seen == epochs[0][:5]
        assert steps_of(loader) == epochs[1]


def test_an_epoch_that_is_skipped_as_a_whole_is_an_empty_pass(epochs: list[Any]) -> None:
    with loader_of(2) as loader:
        loader.skip(range(NUM_STEPS))
        assert len(loader) == 0
        assert list(loader) == []
        assert steps_of(loader) == epochs[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_batches_are_not_built(epochs: list[Any], workers: int) -> None:
    bad = set(epochs[0][0] + epochs[0][6])
    with make_loader(Fragile, kwargs={"bad": bad}, workers=workers, batch_size=BATCH_SIZE) as loader:
        loader.skip([0, 6])
        assert steps_of(loader) == without(epochs[0], 0, 6)


def test_a_skip_between_epochs_is_about_the_next_one_and_after_a_break_about_the_one_that_was_left(
    epochs: list[Any],
) -> None:
    with loader_of() as loader:
        assert len(list(loader)) == NUM_STEPS
        loader.skip(1)
        assert steps_of(loader) == without(epochs[1], 1)
        loader.set_epoch(0)
        for _ in zip(range(2), loader, strict=False):
            pass
        loader.skip(9)
        state = loader.state_dict()
    assert (state["epoch"], state["skipped"]) == (0, [[0, 72, 80], [1, 8, 16]])
    with loader_of() as resumed:
        resumed.load_state_dict(state)
        assert steps_of(resumed) == without(epochs[0][2:], 7)


@pytest.mark.parametrize(("batch_size", "world_size"), [(8, 1), (5, 1), (8, 2), (3, 2)])
def test_a_resumed_run_skips_the_same_samples(epochs: list[Any], batch_size: int, world_size: int) -> None:
    seen: list[int] = []
    with loader_of(2) as loader:
        for step, batch in enumerate(loader):
            seen += ids_of([batch])
            if step == 1:
                loader.skip([4, 5, 9])
                loader.skip([2], epoch=1)
            if step == 3:
                break
        state = json.loads(json.dumps(loader.state_dict()))
    assert state["position"] == 6 * BATCH_SIZE, "what is skipped counts as used"
    assert state["skipped"] == [[0, 32, 48], [0, 72, 80], [1, 16, 24]]
    ranks = [loader_of(batch_size=batch_size, nb_consumer=world_size, uneven="exact") for _ in range(world_size)]
    later = []
    for rank, loader in enumerate(ranks):
        loader.load_state_dict(state)
        loader.start(rank)
        later.append([ids_of(list(loader)), ids_of(list(loader))])
        loader.close()
    first, second = [sorted(flat(rank[epoch] for rank in later)) for epoch in (0, 1)]
    assert sorted(seen + first) == sorted(flat(without(epochs[0], 4, 5, 9)))
    assert second == sorted(flat(without(epochs[1], 2)))
    if world_size == 1:
        assert seen + later[0][0] == flat(without(epochs[0], 4, 5, 9))


def test_the_sampler_leaves_out_what_is_skipped(epochs: list[Any]) -> None:
    with loader_of() as loader:
        loader.skip([2])
        assert list(loader.sampler) == flat(without(epochs[0], 2))
        assert len(loader.sampler) == NUM_SAMPLES - BATCH_SIZE


@pytest.mark.parametrize(
    ("steps", "epoch", "error", "message"),
    [
        (-1, None, ValueError, "step=-1 is too small; it must be at least 0"),
        (1.5, None, TypeError, "steps=1.5 is a float; it must be an integer, or several of them"),
        (True, None, TypeError, "steps=True is a bool"),
        (["3"], None, TypeError, "step='3' is a str; it must be an integer"),
        (13, None, ValueError, "step 13 can't be skipped: step 13 is outside an epoch of 13 steps"),
        ([3, 13], None, ValueError, "step 13 can't be skipped"),
        (1, None, ValueError, "samples 8 to 15 of epoch 0 can't be skipped: the loop is beyond its first 16 samples"),
        (5, -1, ValueError, "epoch=-1 is too small"),
        (5, "next", TypeError, "epoch='next' is a str"),
    ],
)
def test_what_cannot_be_skipped_says_why_and_changes_nothing(
    epochs: list[Any], steps: Any, epoch: Any, error: type[Exception], message: str
) -> None:
    seen = []
    with loader_of() as loader:
        for batch in loader:
            seen += [ids_of([batch])]
            if len(seen) == 2:
                with pytest.raises(error, match=message):
                    loader.skip(steps, epoch)
        assert not loader.state_dict()["skipped"]
    assert seen == epochs[0]


def test_a_step_of_a_past_epoch_can_only_be_skipped_once_that_epoch_is_chosen(epochs: list[Any]) -> None:
    with loader_of() as loader:
        list(loader)
        with pytest.raises(ValueError, match=f"the loop is beyond its first {NUM_SAMPLES} samples"):
            loader.skip(1, 0)
        loader.set_epoch(0)
        loader.skip(1, 0)
        assert steps_of(loader) == without(epochs[0], 1)


def test_an_error_gives_the_number_by_which_the_step_can_be_skipped(epochs: list[Any]) -> None:
    with make_loader(Fragile, kwargs={"bad": {epochs[0][5][0]}}, batch_size=BATCH_SIZE) as loader:
        loader.skip([1, 3])
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        with pytest.raises(ValueError, match="bad") as caught:
            next(iterator)
        assert "batch 3 of epoch 0" in str(caught.value.__cause__)
        assert "which is step 5 if the skipped ones count" in str(caught.value.__cause__)


@pytest.mark.parametrize("expected", [1, 4])
def test_steps_of_another_number_of_ranks_than_start_finds_are_refused(
    expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before `start(rank, world_size)`, the loader knows only what the launcher says."""
    set_environ(monkeypatch, "RANK", "0")
    set_environ(monkeypatch, "WORLD_SIZE", str(expected))
    with loader_of() as loader:
        loader.skip(1)
        with pytest.raises(
            ValueError, match=rf"seemed to be {expected} rank\(s\), but start\(\) says that there are 2"
        ):
            loader.start(rank=0, world_size=2)
    with loader_of() as loader:
        loader.skip(1)
        loader.start(rank=0, world_size=expected)  # as was to be expected
    with loader_of() as loader:
        loader.start(rank=0, world_size=2)
        loader.skip(1)
        state = loader.state_dict()
    with loader_of() as loader:  # what a state says was skipped is the same for all
        loader.load_state_dict(state)
        loader.start(rank=0, world_size=2)
        assert loader.state_dict()["skipped"] == state["skipped"]


def test_a_closed_loader_skips_nothing() -> None:
    loader = loader_of()
    loader.close()
    with pytest.raises(LoaderClosed):
        loader.skip(1)


def test_out_of_order_a_skip_waits_for_the_next_pass(epochs: list[Any]) -> None:
    with loader_of(2, in_order=False) as loader:
        loader.skip(3)
        seen = []
        for batch in loader:
            seen.append(ids_of([batch]))
            if len(seen) == 2:
                with pytest.raises(RuntimeError, match="in the middle of it with in_order=False"):
                    loader.skip(5)
                loader.skip(5, epoch=1)
        assert sorted(seen) == sorted(without(epochs[0], 3))
        assert sorted(ids_of([batch]) for batch in loader) == sorted(without(epochs[1], 5))


def test_a_choice_of_another_epoch_survives_a_skip(epochs: list[Any]) -> None:
    with loader_of() as loader:
        seen = []
        for batch in loader:
            seen.append(ids_of([batch]))
            if len(seen) == 2:
                loader.set_epoch(1)
                loader.skip(4)
                loader.skip(6, epoch=0)
        assert seen == without(epochs[0], 6)
        assert steps_of(loader) == without(epochs[1], 4)


def test_a_loader_that_is_resized_skips_the_same(epochs: list[Any]) -> None:
    with loader_of(1) as loader:
        loader.skip([6])
        seen = []
        for batch in loader:
            seen.append(ids_of([batch]))
            if len(seen) == 2:
                loader.resize(3)
                loader.skip([4])
            if len(seen) == 5:
                loader.resize(1)
        assert seen == without(epochs[0], 4, 6)


@pytest.mark.parametrize("has_started", [False, True])
def test_a_step_that_is_no_batch_of_a_resumed_epoch_is_refused(has_started: bool) -> None:
    with loader_of() as loader:
        for _, _batch in zip(range(3), loader, strict=False):
            pass
        state = loader.state_dict()
    with loader_of(batch_size=16) as loader:  # its batches begin at 24, 40, 56, …
        loader.load_state_dict(state)
        batches = iter(loader)
        expected = steps_of(batches)
        loader.load_state_dict(state)
        if has_started:
            batches = iter(loader)
            assert ids_of([next(batches)]) == expected[0]
        with pytest.raises(ValueError, match="step 3 of epoch 0 can't be skipped: a part of that epoch was delivered"):
            loader.skip(3)
        loader.skip(3, epoch=1)
        assert loader.state_dict()["skipped"] == [[1, 48, 64]]


def test_a_step_is_refused_after_a_skip_with_another_batch_size() -> None:
    with loader_of() as loader:
        loader.skip(1)
        state = loader.state_dict()
    with loader_of(batch_size=16) as loader:  # its batches are 0 to 23 without 8 to 15, 24 to 39, …
        loader.load_state_dict(state)
        with pytest.raises(ValueError, match="step 2 of epoch 0 can't be skipped"):
            loader.skip(2)
        assert loader.state_dict() == state
