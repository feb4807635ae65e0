from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

from swift_loader import DataLoader, StateMismatch
from swift_loader.vision import ImageStage, PrefetchLoader, RandomErasing, create_loader
from tests.unit.vision.conftest import assert_same_batches, seed_everything

pytestmark = [
    pytest.mark.usefixtures("timm_data"),
    # timm's datasets leave it to the garbage collector to close the files of images.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]

SIZE = (3, 32, 32)
SIZES: dict[str, Any] = {
    "input_size_choices": [24, (32, 16), 40],
    "batch_size_choices": [7, 5, 2],
    "batch_choice_seed": 4,
}
REPEATS: dict[str, Any] = {"num_aug_repeats": 3.0, "distributed": True}
TRAINING: dict[str, Any] = {"is_training": True, "re_prob": 0.6, "re_mode": "pixel", "seed": 3}

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ranks": {"distributed": True},
    "repeats": REPEATS,
    "sizes": SIZES,
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
        {"is_training": False},
        {"is_training": False, "crop_pct": 0.9, "crop_mode": "squash", "interpolation": "bicubic", "distributed": True},
        {"is_training": False, "crop_border_pixels": 3, "img_dtype": torch.bfloat16},
        {"is_training": False, "mean": (0.5, 0.5, 0.5), "std": (0.2, 0.3, 0.4), "fp16": True},
        {"is_training": False, "dataset": "stream"},
        {"auto_augment": "rand-m9-mstd0.5", "vflip": 0.5, "worker_seeding": "part"},
        {"no_aug": True, "re_prob": 0.9, "distributed": True},
        {"use_prefetcher": False, "re_prob": 0.9},
        REPEATS,
        {**REPEATS, "num_aug_repeats": 1.5, "use_prefetcher": False, "use_multi_epochs_loader": True},
        SIZES,
        {**SIZES, "num_batches": 9, "batch_choice_weights": [1, 0, 2]},
        {**SIZES, "batch_choice_schedule": "progressive", "batch_schedule_epochs": 3, "distributed": True},
        {"dataset": "stream", "use_prefetcher": False},
    ],
    ids=str,
)
def test_without_a_seed_the_batches_are_timms(timm_data: Any, options: dict[str, Any]) -> None:
    options = {"is_training": True, **options}
    kind: Any = NumberedStream if options.pop("dataset", None) else Numbered
    ours = make(kind(), **options)
    options.pop("use_multi_epochs_loader", None)
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


def test_the_tutorial_runs_with_one_import_changed_and_a_worker_makes_timms_batches(
    timm_data: Any, photos: Path
) -> None:
    dataset = timm_data.ImageDataset(photos)
    train_loader = create_loader(dataset, (3, 224, 224), 4)
    with train_loader:
        ours = list(train_loader)
    assert isinstance(train_loader, PrefetchLoader)
    options = {"num_workers": 0, "device": torch.device("cpu"), "persistent_workers": False}
    theirs = list(timm_data.create_loader(timm_data.ImageDataset(photos), (3, 224, 224), 4, **options))
    assert_same_batches([tuple(part.cpu() for part in batch) for batch in ours], theirs)


def test_the_loop_of_timms_training_script_runs(timm_data: Any, photos: Path) -> None:
    mixup = timm_data.FastCollateMixup(mixup_alpha=0.5, cutmix_alpha=1.0, num_classes=2)
    augmented = {**TRAINING, "collate_fn": mixup, "auto_augment": "rand-m5", "channels_last": True}
    training, held_out = make(timm_data.ImageDataset(photos), **augmented), make(timm_data.ImageDataset(photos))
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 8, 8), torch.nn.Flatten(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with training, held_out:
        for epoch in range(3):
            if epoch == 2 and training.mixup_enabled:
                training.mixup_enabled = False
            if hasattr(training.sampler, "set_epoch"):
                training.sampler.set_epoch(epoch)
            num_batches = 0
            for images, targets in training:
                assert images.is_contiguous(memory_format=torch.channels_last)
                loss = torch.nn.functional.cross_entropy(model(images), targets)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                num_batches += 1
            assert num_batches == len(training) == len(training.dataset) // 4 == 3
            with torch.inference_mode():
                counts = [len(model(images).argmax(dim=1) == targets) for images, targets in held_out]
            assert sum(counts) == len(held_out.dataset) == 14
        assert not training.mixup_enabled


def test_augmentation_splits_come_one_after_the_other(timm_data: Any, photos: Path) -> None:
    dataset = timm_data.AugMixDataset(timm_data.ImageDataset(photos), num_splits=2)
    options = {**TRAINING, "auto_augment": "augmix-m5-w2", "re_split": True, "re_prob": 1.0, "re_mode": "const"}
    with make(dataset, num_aug_splits=2, **options) as loader:
        images, targets = next(iter(loader))
    assert images.shape == (8, *SIZE)
    assert targets[:4].tolist() == targets[4:].tolist()
    assert [bool((image == 0).all(dim=0).any()) for image in images] == [False] * 4 + [True] * 4


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
@pytest.mark.parametrize("case", ["plain", "all"])
def test_any_number_of_workers_gives_the_same_batches(case: str) -> None:
    with make(**CASES[case], **TRAINING) as loader:
        expected = [*loader, *epoch_of(loader, 1)]
    with make(workers=2, **CASES[case], **TRAINING) as loader:
        batches = iter(loader)
        begun = [next(batches), next(batches)]
        state = copy.deepcopy(loader.state_dict())
        assert_same_batches([*begun, *batches, *epoch_of(loader, 1)], expected)
    with make(workers=1, **CASES[case], **TRAINING) as loader:
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


class Fragile(Numbered):
    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index == 1:
            raise OSError("no such picture")
        return super().__getitem__(index)


def test_options_of_a_data_loader_reach_it() -> None:
    own: dict[str, Any] = {
        "in_order": False,
        "worker_restarts": 1,
        "timeout": 5.0,
        "stall_warning": 9.0,
        "max_errors": 3,
    }
    loader = make(Fragile(), workers=2, on_error="skip", **own).loader
    assert {name: getattr(loader, name) for name in own} == own
    with pytest.warns(match="1 of 30 samples failed"), make(Fragile(), on_error="skip") as skipping:
        assert targets_of(skipping) == [0, *range(2, 30)]


def test_timms_options_configure_the_stage() -> None:
    erasing: dict[str, Any] = {"re_prob": 0.6, "re_mode": "rand", "re_count": 2, "re_split": True}
    options: dict[str, Any] = {
        "mean": (0.1,),
        "std": (0.2,),
        "img_dtype": torch.float16,
        "channels_last": True,
        **erasing,
    }
    positions = Numbered(), (1, 16, 16), 4, True
    expected = RandomErasing(0.6, mode="rand", max_count=2, num_splits=2)
    loader: Any = create_loader(*positions, num_workers=0, **options)
    assert loader.stage == ImageStage((0.1,), (0.2,), 1, torch.float16, channels_last=True, erasing=expected)
    assert make(**{**options, "mean": (0.1,) * 3, "std": (0.2,) * 3}).stage.erasing is None  # it doesn't train


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"re_mod": "pixel"}, TypeError, "unexpected keyword argument 're_mod'"),
        ({"batch_size": 8}, TypeError, "multiple values for argument 'batch_size'"),
        ({"seed": -1}, ValueError, "seed=-1 is too small"),
        ({"on_error": "never"}, ValueError, "on_error='never'"),
        ({"num_workers": -1}, ValueError, "num_workers option should be non-negative"),
        ({"input_size_choices": []}, ValueError, "must contain at least one size"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        create_loader(Numbered(), SIZE, 4, **{"num_workers": 0, "is_training": True, **options})
