from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from swift_loader import SwiftLoader
from swift_loader.sampling.permutation import Purpose, derive_key
from swift_loader.vision import PrefetchLoader, create_loader
from swift_loader.worker.seeding import preserved_generators, seed_generators
from tests.unit.vision.conftest import assert_same_batches, seed_everything

# timm's datasets leave it to the garbage collector to close the files of images.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

SIZE = (3, 32, 32)
SEED = 11
TRAINING: dict[str, Any] = {"is_training": True, "re_prob": 0.6, "re_mode": "pixel", "re_count": 2, "device": "cpu"}


def make(timm_data: Any, photos: Path, *, workers: int = 0, **options: Any) -> Any:
    return create_loader(timm_data.ImageDataset(photos), SIZE, 4, num_workers=workers, **options)


def made_by_timm(timm_data: Any, photos: Path, **options: Any) -> list[Any]:
    options = {"device": torch.device("cpu"), "persistent_workers": False, **options}
    return list(timm_data.create_loader(timm_data.ImageDataset(photos), SIZE, 4, num_workers=0, **options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"crop_pct": 0.9, "crop_mode": "squash", "interpolation": "bicubic"},
        {"crop_border_pixels": 3, "img_dtype": torch.bfloat16},
        {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.3, 0.4), "fp16": True},
        {"use_prefetcher": False},
        {"use_multi_epochs_loader": True, "worker_seeding": "part", "re_prob": 0.9},
    ],
    ids=str,
)
def test_evaluation_batches_are_timms(timm_data: Any, photos: Path, options: dict[str, Any]) -> None:
    theirs = made_by_timm(timm_data, photos, **options)
    with make(timm_data, photos, device="cpu", **options) as loader:
        assert len(loader) == len(theirs) == 4
        assert_same_batches(list(loader), theirs)


@pytest.mark.parametrize("extra", [{}, {"no_aug": True}, {"auto_augment": "rand-m9-mstd0.5", "vflip": 0.5}], ids=str)
def test_training_batches_are_what_timm_makes_of_the_same_samples_and_seeds(
    timm_data: Any, photos: Path, keys: list[int], extra: dict[str, Any]
) -> None:
    ours, indices = [], []
    with make(timm_data, photos, seed=SEED, **TRAINING, **extra) as loader:
        for epoch in range(2):
            for batch in loader:
                ours.append(batch)
                indices.append((epoch, loader.loader.batch_indices.tolist()))
        dataset = loader.dataset  # with timm's transform
    assert len({tuple(batch) for _, batch in indices}) == len(ours) == 6
    erasing = {} if "no_aug" in extra else {key: TRAINING[key] for key in ("re_prob", "re_mode", "re_count")}
    theirs = []
    with preserved_generators():
        for (epoch, batch), key in zip(indices, keys or [0] * len(ours), strict=True):
            samples = []
            for index in batch:
                seed_generators(derive_key(SEED, Purpose.SAMPLE.value, epoch, index))
                samples.append(dataset[index])
            collated = timm_data.loader.fast_collate(samples)
            seed_everything(key)
            theirs += timm_data.loader.PrefetchLoader([collated], device=torch.device("cpu"), **erasing)
    assert_same_batches(ours, theirs)


@pytest.mark.slow
@pytest.mark.processes
def test_training_batches_are_the_same_with_any_workers_and_after_a_resume(timm_data: Any, photos: Path) -> None:
    with make(timm_data, photos, seed=SEED, **TRAINING) as loader:
        expected = [*loader, *loader]
    with make(timm_data, photos, workers=1, seed=SEED, **TRAINING) as loader:
        batches = iter(loader)
        begun = [next(batches)]
        state = loader.state_dict()
    with make(timm_data, photos, workers=2, seed=SEED, **TRAINING) as loader:
        loader.load_state_dict(state)
        assert_same_batches([*begun, *loader, *loader], expected)


def test_the_loop_of_timms_training_script_runs(timm_data: Any, photos: Path) -> None:
    mixup = timm_data.FastCollateMixup(mixup_alpha=0.5, cutmix_alpha=1.0, num_classes=2)
    training = make(timm_data, photos, **TRAINING, collate_fn=mixup, auto_augment="rand-m5", channels_last=True)
    held_out = make(timm_data, photos, device="cpu")
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 8, 8), torch.nn.Flatten(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with training, held_out:
        for epoch in range(3):
            if epoch == 2 and training.mixup_enabled:
                training.mixup_enabled = False
            if hasattr(training.sampler, "set_epoch"):
                training.sampler.set_epoch(epoch)
            assert training.batch_sampler is None
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
    with create_loader(dataset, SIZE, 4, num_workers=0, num_aug_splits=2, **options) as loader:
        images, targets = next(iter(loader))
    assert images.shape == (8, *SIZE)
    assert targets[:4].tolist() == targets[4:].tolist()
    assert [bool((image == 0).all(dim=0).any()) for image in images] == [False] * 4 + [True] * 4


def test_ranks_share_the_dataset_if_it_is_distributed(
    timm_data: Any, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    seen: list[int] = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with make(timm_data, photos, distributed=True, seed=1, **TRAINING) as loader:
            for _ in loader:
                seen += loader.loader.batch_indices.tolist()
    assert len(seen) == len(set(seen)) == 8
    with make(timm_data, photos, device="cpu") as loader:  # each process for itself
        assert len(loader) == 4


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


def test_without_the_prefetcher_it_is_the_loader_itself(timm_data: Any, photos: Path) -> None:
    with make(timm_data, photos, use_prefetcher=False, is_training=True, re_prob=1.0, seed=1) as loader:
        assert isinstance(loader, SwiftLoader)
        images, targets = next(iter(loader))
        assert (images.dtype, targets.dtype) == (torch.float32, torch.int64)
        assert all((image == 0).all(dim=0).any() for image in images)


class NoTransform(Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


class OnlyIterable:
    transform = None

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (NoTransform(), "the dataset, a NoTransform, needs an attribute 'transform', which create_loader sets"),
        (OnlyIterable(), "the dataset, a OnlyIterable, needs .* __getitem__, or to be an IterableDataset of torch"),
    ],
)
def test_datasets_that_cannot_be_used_are_refused(dataset: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        create_loader(dataset, SIZE, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_aug_repeats": 0.5}, "num_aug_repeats=0.5 isn't a number of repeats; it must be 0, or at least 1"),
        ({"num_aug_repeats": float("inf")}, "num_aug_repeats=inf isn't a number of repeats"),
        (
            {"worker_seeding": lambda info: 1},
            "isn't supported, because random numbers are keyed by sample, not by worker",
        ),
        ({"num_workers": -1}, "worker_per_consumer=-1 is too small"),
    ],
)
def test_what_is_not_supported_is_refused(timm_data: Any, photos: Path, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_loader(timm_data.ImageDataset(photos), SIZE, 4, **options)


def test_the_parameters_are_timms_in_timms_order(timm_data: Any) -> None:
    ours = list(inspect.signature(create_loader).parameters)
    theirs = list(inspect.signature(timm_data.create_loader).parameters)
    assert ours[: len(theirs)] == theirs


def test_options_reach_the_loader_and_the_stage(timm_data: Any, photos: Path) -> None:
    loader = make(timm_data, photos, device="cpu", channels_last=True, img_dtype=torch.float16)
    assert (loader.stage.channels_last, loader.stage.img_dtype) == (True, torch.float16)
    assert loader.batch_size == 4
    with pytest.raises(ValueError, match="on_error='never'"):
        make(timm_data, photos, on_error="never")


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("batchsize", "did you mean 'batch_size'?"),
        ("re_probability", "did you mean 're_prob'?"),
        ("shuffle", "is_training=True shuffles"),
        ("worker_per_consumer", "give num_workers, the worker processes of this rank"),
    ],
)
def test_an_option_that_does_not_exist_is_refused_with_what_to_do_instead(option: str, hint: str) -> None:
    options: dict[str, Any] = {option: 1}
    with pytest.raises(TypeError) as caught:
        create_loader(NoTransform(), SIZE, 4, **options)
    assert str(caught.value) == f"create_loader has no option {option!r}; {hint}"
