"""`create_loader` in timm's order: with repeated augmentation, several sizes, and iterable datasets."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

from swift_loader import DataLoader, StateMismatch
from swift_loader.vision import create_loader
from tests.unit.vision.conftest import assert_same_batches, seed_everything

pytestmark = pytest.mark.usefixtures("timm_data")

SIZE = (3, 32, 32)
SIZES: dict[str, Any] = {
    "input_size_choices": [24, (32, 16), 40],
    "batch_size_choices": [7, 5, 2],
    "batch_choice_seed": 4,
}
REPEATS: dict[str, Any] = {"num_aug_repeats": 3.0, "distributed": True}
TRAINING: dict[str, Any] = {"is_training": True, "re_prob": 0.6, "re_mode": "pixel", "seed": 3}

CASES: dict[str, dict[str, Any]] = {
    "repeats": REPEATS,
    "sizes": SIZES,
    "sizes of ranks": {**SIZES, "distributed": True},
    "all": {**SIZES, **REPEATS, "num_batches": 9},
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

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        info: Any = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        pictures = Numbered(self.num_samples)
        pictures.transform = self.transform
        for number in range(first, self.num_samples, step):
            yield pictures[(number + self.epoch) % self.num_samples]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.fixture(autouse=True)
def be_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes this process one rank of several. It is the second of two."""

    def be(rank: int, world_size: int) -> None:
        for name, value in {"rank": rank, "world_size": world_size}.items():
            monkeypatch.setenv(name.upper(), str(value))
            monkeypatch.setattr(torch.distributed, f"get_{name}", lambda value=value: value)

    be(1, 2)
    return be


def make(dataset: Any = None, *, workers: int = 0, **options: Any) -> Any:
    dataset = Numbered() if dataset is None else dataset
    return create_loader(dataset, SIZE, 4, num_workers=workers, device="cpu", **options)


def epoch_of(loader: Any, epoch: int) -> list[Any]:
    loader.set_epoch(epoch)
    return list(loader)


def targets_of(batches: Any) -> list[int]:
    return [int(target) for _, targets in batches for target in targets]


@pytest.mark.parametrize(
    "options",
    [
        REPEATS,
        {**REPEATS, "num_aug_repeats": 1.5, "use_prefetcher": False, "use_multi_epochs_loader": True},
        SIZES,
        {**SIZES, "num_batches": 9, "batch_choice_weights": [1, 0, 2]},
        {**SIZES, "batch_choice_schedule": "progressive", "batch_schedule_epochs": 3, "distributed": True},
        {**SIZES, **REPEATS, "num_aug_repeats": 1},
        {"is_training": False, "dataset": "stream", "num_aug_repeats": 3},
        {"dataset": "stream", "use_prefetcher": False},
    ],
    ids=str,
)
def test_without_a_seed_the_batches_are_timms(timm_data: Any, options: dict[str, Any]) -> None:
    options = {"is_training": True, **options}
    kind: Any = NumberedStream if options.pop("dataset", None) else Numbered
    ours = make(kind(), **options)
    options.pop("use_multi_epochs_loader", None)
    if options.get("num_aug_repeats") == 1 or not options["is_training"]:
        options.pop("num_aug_repeats")
    theirs = timm_data.create_loader(
        kind(), SIZE, 4, num_workers=0, persistent_workers=False, device=torch.device("cpu"), **options
    )
    assert kind is NumberedStream or len(ours) == len(theirs)
    assert isinstance(getattr(ours, "loader", ours), DataLoader)
    for epoch in (0, 2):
        seed_everything(epoch)
        found = epoch_of(ours, epoch)
        for taker in (theirs.dataset, theirs.sampler, theirs.batch_sampler):
            if hasattr(taker, "set_epoch"):
                taker.set_epoch(epoch)
        seed_everything(epoch)
        assert_same_batches([tuple(batch) for batch in found], [tuple(batch) for batch in theirs])


@pytest.mark.parametrize("seed", [3, None])
def test_repeats_of_a_sample_draw_otherwise_on_each_rank(seed: int | None, be_rank: Any) -> None:
    by_rank = []
    for rank in range(3):
        be_rank(rank, 3)
        with make(Numbered(300), **REPEATS, **{**TRAINING, "seed": seed}) as loader:
            by_rank.append(list(loader))
    assert targets_of(by_rank[0]) == targets_of(by_rank[1]) == targets_of(by_rank[2])
    first_images = [batches[0][0][0] for batches in by_rank]
    assert not torch.equal(first_images[0], first_images[1])
    assert not torch.equal(first_images[0], first_images[2])


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_has_the_same_batches_after_any_of_them(case: str) -> None:
    states = []
    with make(**CASES[case], **TRAINING) as loader:
        expected = []
        for batch in loader:
            expected.append(batch)
            states.append(copy.deepcopy(loader.state_dict()))
        states.append(loader.state_dict())
        later = epoch_of(loader, 1)
    for num_before in {1, len(expected) - 1, len(expected)}:
        torch.rand(7)
        with make(**CASES[case], **TRAINING) as loader:
            loader.load_state_dict(states[num_before - 1])
            assert_same_batches(list(loader), expected[num_before:])
            assert_same_batches(epoch_of(loader, 1), later)
    assert targets_of(later) != targets_of(expected)
    with make(**CASES[case], **TRAINING) as loader:
        loader.load_state_dict(states[-1])
        assert_same_batches(epoch_of(loader, 1), later)


@pytest.mark.slow
@pytest.mark.processes
def test_any_number_of_workers_gives_the_same_batches() -> None:
    with make(**CASES["all"], **TRAINING) as loader:
        expected = [*loader, *epoch_of(loader, 1)]
    with make(workers=2, **CASES["all"], **TRAINING) as loader:
        batches = iter(loader)
        begun = [next(batches), next(batches)]
        state = copy.deepcopy(loader.state_dict())
        assert_same_batches([*begun, *batches, *epoch_of(loader, 1)], expected)
    with make(workers=1, **CASES["all"], **TRAINING) as loader:
        loader.load_state_dict(state)
        assert_same_batches([*begun, *loader, *epoch_of(loader, 1)], expected)


@pytest.mark.slow
@pytest.mark.processes
def test_persistent_workers_see_that_mixup_is_switched_off(timm_data: Any) -> None:
    mixup = timm_data.FastCollateMixup(mixup_alpha=1.0, label_smoothing=0.0, num_classes=30)
    with make(workers=1, collate_fn=mixup, input_size_choices=[24, 40], **TRAINING) as loader:
        for is_mixed in (True, False, True):
            loader.mixup_enabled = is_mixed
            assert any(bool((targets.max(dim=1).values < 1).any()) for _, targets in loader) is is_mixed


def test_a_stream_is_resumed() -> None:
    with make(NumberedStream(), is_training=True, seed=1) as loader:
        expected = targets_of(loader)
        begun = [batch for _, batch in zip(range(2), loader, strict=False)]
        state = loader.state_dict()
    with make(NumberedStream(), is_training=True, seed=1) as loader:
        loader.load_state_dict(state)
        assert targets_of([*begun, *loader]) == expected


def test_a_state_of_another_seed_is_refused() -> None:
    with make(**SIZES, **TRAINING) as loader:
        state = loader.state_dict()
    with make(**{**SIZES, **TRAINING, "seed": 4}) as loader, pytest.raises(StateMismatch, match=r"seed=3, .* seed=4"):
        loader.load_state_dict(state)


def test_options_of_a_data_loader_reach_it() -> None:
    loader = make(in_order=False, worker_restarts=1, timeout=5.0, **SIZES, **TRAINING).loader
    assert (loader.in_order, loader.worker_restarts, loader.timeout) == (False, 1, 0)
    assert type(loader.dataset.dataset) is Numbered


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_aug_repeats": 2}, "num_aug_repeats=2 needs distributed=True and a map-style dataset"),
        ({"dataset": NumberedStream(), **REPEATS}, "num_aug_repeats=3.0 needs distributed=True and a map-style"),
        ({"dataset": NumberedStream(), "nearby_shuffle": 8}, "nearby_shuffle=8 isn't supported with an iterable"),
        ({**REPEATS, "max_errors": 3}, "max_errors=3 isn't supported with num_aug_repeats, with which timm"),
        ({**SIZES, "on_error": "skip"}, r"on_error='skip' isn't supported with input_size_choices, .*; leave it out"),
        ({**SIZES, "seed": -1}, "seed=-1 is too small"),
        ({**SIZES, "is_training": False}, "only supported for training"),
        ({**SIZES, "num_aug_splits": 2}, "Augmentation splits are not supported"),
        ({"input_size_choices": []}, "must contain at least one size"),
        ({"input_size_choices": [8], "batch_size_choices": [31]}, "No full scheduled batch fits"),
        ({"batch_size_choices": [2]}, r"batch_size_choices=\[2\] needs input_size_choices"),
        ({"batch_choice_weights": [2]}, r"batch_choice_weights=\[2\] needs input_size_choices"),
        ({"num_batches": 9}, "num_batches=9 needs input_size_choices"),
    ],
)
def test_what_does_not_go_with_timms_order_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**{**TRAINING, **options})
