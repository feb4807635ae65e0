"""`create_loader` with repeated augmentation, several sizes, a number of batches and iterable datasets."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

from swift_loader import StateMismatch
from swift_loader.ranks.ranks import Ranks
from swift_loader.vision import create_loader
from swift_loader.vision.image_loader import ImageBatches
from tests.unit.vision.conftest import assert_same_batches

pytestmark = pytest.mark.usefixtures("timm_data")

SIZE = (3, 32, 32)
SIZES: dict[str, Any] = {
    "input_size_choices": [24, (32, 16), 40],
    "batch_size_choices": [7, 5, 2],
    "batch_choice_seed": 4,
}
TRAINING: dict[str, Any] = {"is_training": True, "re_prob": 0.6, "re_mode": "pixel", "seed": 3}
CPU = torch.device("cpu")

CASES: dict[str, dict[str, Any]] = {
    "repeats": {"num_aug_repeats": 3.0},
    "sizes": SIZES,
    "number of batches": {"num_batches": 9},
    "all": {**SIZES, "num_aug_repeats": 1.5, "num_batches": 9, "nearby_shuffle": 12},
}


class Numbered(Dataset[Any]):
    transform: Any = None

    def __init__(self, num_samples: int = 30) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Any, int]:
        pixels = np.random.default_rng(index).integers(0, 256, (40, 40, 3), np.uint8)
        image = Image.fromarray(pixels)
        return (image if self.transform is None else self.transform(image)), index


class NumberedStream(IterableDataset[Any]):
    """The same pictures, shared out over the workers. The first one is another one in each epoch."""

    transform: Any = None

    def __init__(self, num_samples: int = 30) -> None:
        self.num_samples = num_samples
        self.epoch = 0
        self.num_workers = -1

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        info: Any = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        pictures = Numbered(self.num_samples)
        pictures.transform = self.transform
        for number in range(first, self.num_samples, step):
            yield pictures[(number + self.epoch) % self.num_samples]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def set_loader_cfg(self, num_workers: int) -> None:
        self.num_workers = num_workers


def make(dataset: Any = None, *, workers: int = 0, **options: Any) -> Any:
    dataset = Numbered() if dataset is None else dataset
    return create_loader(dataset, SIZE, 4, num_workers=workers, device="cpu", **options)


def made_by_timm(timm_data: Any, dataset: Any, **options: Any) -> Any:
    options = {"device": CPU, "persistent_workers": False, "num_workers": 0, **options}
    return timm_data.create_loader(dataset, SIZE, 4, **options)


def pieces(loader: Any, num_batches: int) -> tuple[list[Any], Any]:
    """Return the next batches, and the state after them."""
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) == num_batches:
            break
    return batches, copy.deepcopy(loader.state_dict())


def watched(loader: Any, num_batches: int) -> tuple[list[Any], Any]:
    """Return the batches of a pass, and the state after so many of them."""
    batches, state = [], None
    for batch in loader:
        batches.append(batch)
        if len(batches) == num_batches:
            state = copy.deepcopy(loader.state_dict())
    return batches, state


def targets_of(batches: Any) -> list[int]:
    return [int(target) for _, targets in batches for target in targets]


# Repeated augmentation ------------------------------------------------------------------------------------------------


def test_repeats_go_to_all_ranks_with_different_draws_in_timms_number_of_batches(
    timm_data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    by_rank = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        dataset = Numbered(300)
        theirs = timm_data.distributed_sampler.RepeatAugSampler(dataset, 3, rank, num_repeats=3)
        with make(dataset, distributed=True, num_aug_repeats=3.0, **TRAINING) as loader:
            by_rank.append(list(loader))
            assert len(by_rank[-1]) == len(loader) == len(theirs) // 4
    assert targets_of(by_rank[0]) == targets_of(by_rank[1]) == targets_of(by_rank[2])
    first_images = [batches[0][0][0] for batches in by_rank]
    assert not torch.equal(first_images[0], first_images[1])
    assert not torch.equal(first_images[0], first_images[2])


def test_on_one_rank_the_repeats_are_in_one_batch_with_different_draws() -> None:
    with make(num_aug_repeats=2.0, **TRAINING) as loader:
        for images, targets in loader:
            assert targets[0] == targets[1] != targets[2] == targets[3]
            assert not torch.equal(images[0], images[1])


# Several sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"num_batches": 9, "batch_choice_weights": [1, 0, 2]},
        {"batch_choice_schedule": "progressive", "batch_schedule_epochs": 3},
    ],
    ids=str,
)
def test_shapes_are_timms_in_each_epoch(timm_data: Any, extra: dict[str, Any]) -> None:
    theirs = made_by_timm(timm_data, Numbered(), is_training=True, **SIZES, **extra)
    with make(is_training=True, seed=1, **SIZES, **extra) as ours:
        assert len(ours) == len(theirs)
        assert ours.batch_sampler.batch_sizes == theirs.batch_sampler.batch_sizes
        assert ours.batch_sampler.average_batch_size == theirs.batch_sampler.average_batch_size
        for epoch in (0, 2):
            ours.batch_sampler.set_epoch(epoch)
            theirs.batch_sampler.set_epoch(epoch)
            assert [images.shape for images, _ in ours] == [images.shape for images, _ in theirs]


def test_the_ranks_have_the_same_shapes_and_other_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    shapes, targets = [], []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with make(distributed=True, **SIZES, **TRAINING) as loader:
            batches = list(loader)
        shapes.append([images.shape for images, _ in batches])
        targets += targets_of(batches)
    assert shapes[0] == shapes[1]
    assert max(Counter(targets).values()) == 1


def test_batches_larger_than_an_epoch_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"batches of \[31, 40\] samples don't fit into an epoch of 30 samples per rank"
    ):
        make(input_size_choices=[8, 16], batch_size_choices=[31, 40], **TRAINING)


# A number of batches --------------------------------------------------------------------------------------------------


def test_a_number_of_batches_begins_the_dataset_again_in_training() -> None:
    with make(num_batches=20, **TRAINING) as loader:
        batches = list(loader)
    targets = targets_of(batches)
    assert len(batches) == 20
    assert sorted(targets[:30]) == sorted(targets[30:60]) == list(range(30))
    assert targets[:30] != targets[30:60]


@pytest.mark.parametrize(("num_batches", "expected"), [(3, 12), (50, 30)])
def test_a_number_of_batches_is_a_limit_in_evaluation(num_batches: int, expected: int) -> None:
    with make(num_batches=num_batches) as loader:
        assert len(loader) == min(num_batches, 8)
        assert targets_of(loader) == list(range(expected))


# Iterable datasets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"use_prefetcher": False}], ids=str)
def test_an_iterable_dataset_gives_timms_batches(timm_data: Any, options: dict[str, Any]) -> None:
    theirs = list(made_by_timm(timm_data, NumberedStream(), **options))
    with make(NumberedStream(), **options) as loader:
        assert loader.dataset.num_workers == 0
        assert_same_batches(list(loader), [tuple(batch) for batch in theirs])


def test_the_number_of_batches_ends_each_epoch_of_a_stream() -> None:
    with make(NumberedStream(), num_batches=3, seed=1) as loader:
        for epoch in range(2):
            loader.set_epoch(epoch)
            batches = list(loader)
            assert len(batches) == len(loader) == 3
            assert targets_of(batches) == list(range(epoch, epoch + 12))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_aug_repeats": 2},
            "num_aug_repeats=2 isn't supported with an iterable dataset, whose samples have no index",
        ),
        ({"input_size_choices": [8]}, r"input_size_choices=\[8\] isn't supported with an iterable dataset"),
        ({"nearby_shuffle": 8}, "nearby_shuffle=8 isn't supported with an iterable dataset"),
    ],
)
def test_what_needs_indices_is_refused_for_a_stream(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(NumberedStream(), is_training=True, **options)


# Epochs and states ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_epochs_differ_and_can_be_chosen(case: str) -> None:
    with make(**CASES[case], **TRAINING) as loader:
        first, second = list(loader), list(loader)
        loader.set_epoch(0)
        again = list(loader)
    assert targets_of(first) != targets_of(second)
    assert_same_batches(again, first)


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_has_the_same_batches_after_any_of_them(case: str) -> None:
    with make(**CASES[case], **TRAINING) as loader:
        expected = [*loader, *loader]
        num_batches = len(loader)
    for num_before in (1, num_batches - 1, num_batches):
        with make(**CASES[case], **TRAINING) as loader:
            begun, state = pieces(loader, num_before)
        with make(**CASES[case], **TRAINING) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            rest = [*loader, *loader] if num_before < num_batches else list(loader)
        assert_same_batches([*begun, *rest], expected)


@pytest.mark.parametrize("options", [{}, {"num_batches": 5}], ids=str)
def test_a_stream_is_resumed(options: dict[str, Any]) -> None:
    with make(NumberedStream(), is_training=True, seed=1, **options) as loader:
        expected = targets_of(loader)
    with make(NumberedStream(), is_training=True, seed=1, **options) as loader:
        begun, state = pieces(loader, 2)
    with make(NumberedStream(), is_training=True, seed=1, **options) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert targets_of([*begun, *loader]) == expected


@pytest.mark.slow
@pytest.mark.processes
def test_any_number_of_workers_gives_the_same_batches() -> None:
    with make(**CASES["all"], **TRAINING) as loader:
        expected = [*loader, *loader]
    with make(workers=2, **CASES["all"], **TRAINING) as loader:
        whole, state = watched(loader, 3)
        assert_same_batches([*whole, *loader], expected)
    with make(workers=1, **CASES["all"], **TRAINING) as loader:
        loader.load_state_dict(state)
        assert_same_batches(list(loader), whole[3:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 4}, "the state was saved with seed=3, but this sampler has seed=4"),
        ({"num_aug_repeats": 2}, "the state was saved with checksum of batch sizes and repeats="),
        ({"nearby_shuffle": 8}, "the state was saved with nearby_shuffle=0"),
    ],
)
def test_a_state_of_another_order_is_refused(change: dict[str, Any], message: str) -> None:
    with make(num_aug_repeats=3, **TRAINING) as loader:
        state = loader.state_dict()
    with make(**{"num_aug_repeats": 3, **TRAINING, **change}) as loader, pytest.raises(StateMismatch, match=message):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampler": "distributed"}, "the state's sampler is 'distributed', but it was loaded into a create_loader"),
        ({"position": -1}, "the state's position=-1"),
        ({"num_samples": 31}, "num_samples=31"),
    ],
)
def test_a_changed_state_is_refused(change: dict[str, Any], message: str) -> None:
    with make(num_aug_repeats=2, **TRAINING) as loader:
        state = loader.state_dict()
        with pytest.raises(StateMismatch, match=message):
            loader.load_state_dict({**state, **change})
        loader.load_state_dict({})
        assert loader.state_dict() == state


def test_a_batch_that_raises_counts_in_the_state() -> None:
    def collate(samples: Any) -> list[int]:
        calls.append(samples)
        if len(calls) == 2:
            raise OSError("a broken disk")
        return [target for _, target in samples]

    calls: list[Any] = []
    with make(num_aug_repeats=2, use_prefetcher=False, collate_fn=collate, **TRAINING) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(OSError, match="a broken disk"):
            next(batches)
        state = loader.state_dict()
        rest = list(batches)
        assert loader.state_dict()["finished"] == 1
        loader.load_state_dict(state)
        assert list(loader) == rest


def test_the_loops_random_numbers_stay_its_own() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    with make(num_aug_repeats=2, **TRAINING) as loader:
        torch.manual_seed(5)
        assert len(list(loader)) == len(loader)
        assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_size_choices": []}, r"input_size_choices=\[\] isn't supported with no sizes in it"),
        ({"input_size_choices": [(1, 8, 8)]}, r"has the size \(1, 8, 8\); each must be .* C=3"),
        ({"input_size_choices": [8, 16], "batch_size_choices": [2]}, r"batch_size_choices=\[2\] has 1 values"),
        (
            {"input_size_choices": [8, 16], "batch_choice_weights": [1, -1]},
            "choice_weights must contain .* non-negative",
        ),
        ({"input_size_choices": [8, 16], "batch_choice_schedule": "progressive"}, "schedule_epochs must be"),
        ({"batch_size_choices": [2]}, r"batch_size_choices=\[2\] needs input_size_choices"),
        ({"batch_choice_weights": [2]}, r"batch_choice_weights=\[2\] needs input_size_choices"),
    ],
)
def test_sizes_that_cannot_be_chosen_from_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**TRAINING, **options)


@given(st.integers(1, 1200), st.one_of(st.integers(2, 6).map(float), st.floats(1, 6)), st.integers(1, 5), st.data())
def test_the_selection_is_timms(
    timm_data: Any, num_samples: int, num_repeats: float, world_size: int, data: Any
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    theirs = timm_data.distributed_sampler.RepeatAugSampler(
        range(num_samples), world_size, rank, shuffle=False, num_repeats=num_repeats
    )
    if num_repeats > 1 and len(theirs):
        ours = ImageBatches(
            num_samples, 8, Ranks(rank, world_size, "a test"), 3, is_training=False, num_repeats=num_repeats
        )
        assert [index for batch in ours for index, _ in batch] == list(theirs)
