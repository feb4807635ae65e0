"""`create_loader`: makes a loader with timm's transforms from timm's options. Runs in the trainer.

It imports timm when it is called. timm's worker seeds and loader classes aren't needed: a batch's indices are computed,
workers always persist from epoch to epoch, and a sample's random numbers depend on seed, epoch and the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from numbers import Real
from typing import Any

import torch
from torch.utils.data import IterableDataset

from swift_loader.loader import SwiftLoader
from swift_loader.unknown_options import refuse_unknown
from swift_loader.vision.epochs import EpochLoader
from swift_loader.vision.prefetch import PrefetchLoader
from swift_loader.vision.sizes import SizeChoices, count_channels, refuse_choices
from swift_loader.vision.sources import is_native, make_native, make_sampled, make_stream, taken_by
from swift_loader.vision.stage import IMAGENET_MEAN, IMAGENET_STD

__all__ = ["create_loader"]

_WORKER_SEEDINGS = ("all", "part")


def create_loader(  # noqa: PLR0917 - timm's, in timm's order
    dataset: Any,
    input_size: int | tuple[int, int] | tuple[int, int, int],
    batch_size: int,
    is_training: bool = False,
    no_aug: bool = False,
    re_prob: float = 0.0,
    re_mode: str = "const",
    re_count: int = 1,
    re_split: bool = False,
    train_crop_mode: str | None = None,
    scale: tuple[float, float] | None = None,
    ratio: tuple[float, float] | None = None,
    hflip: float = 0.5,
    vflip: float = 0.0,
    color_jitter: float | Sequence[float] = 0.4,
    color_jitter_prob: float | None = None,
    grayscale_prob: float = 0.0,
    gaussian_blur_prob: float = 0.0,
    auto_augment: str | None = None,
    num_aug_repeats: float = 0,
    num_aug_splits: int = 0,
    interpolation: str = "bilinear",
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    num_workers: int = 1,
    distributed: bool = False,
    crop_pct: float | None = None,
    crop_mode: str | None = None,
    crop_border_pixels: int | None = None,
    collate_fn: Callable[..., Any] | None = None,
    pin_memory: bool = False,
    fp16: bool = False,
    img_dtype: torch.dtype = torch.float32,
    device: torch.device | str | int | None = None,
    use_prefetcher: bool = True,
    use_multi_epochs_loader: bool = False,
    persistent_workers: bool = True,
    worker_seeding: str = "all",
    tf_preprocessing: bool = False,
    input_size_choices: Sequence[Any] | None = None,
    batch_size_choices: Sequence[int] | None = None,
    batch_choice_weights: Sequence[float] | None = None,
    batch_choice_seed: int = 0,
    batch_choice_schedule: str = "constant",
    batch_schedule_epochs: int | None = None,
    batch_schedule_spread: float = 0.65,
    batch_schedule_random_mix: float = 0.1,
    num_batches: int | None = None,
    *,
    channels_last: bool = False,
    seed: int | None = None,
    nearby_shuffle: int = 0,
    in_order: bool = True,
    on_error: str = "raise",
    max_errors: float | None = None,
    timeout: float | None = None,
    worker_restarts: int = 3,
    **unknown: Any,
) -> PrefetchLoader | SwiftLoader | EpochLoader:
    """Set timm's transform on a dataset, and return a loader of it. Starts no worker.

    Args:
        dataset: A map-style dataset or an `IterableDataset` whose samples are `(image, target)`. Its attribute
            `transform` is set.
        input_size: `(C, H, W)`, `(H, W)`, or the side of a square.
        batch_size: Samples per batch and rank.
        is_training: Shuffle, augment, and drop an incomplete last batch.
        no_aug: Don't augment, even if `is_training`.
        re_prob: Probability of random erasing. This and the options up to `num_aug_splits` apply in training only.
        re_mode: How to fill an erased rectangle, see `RandomErasing.mode`.
        re_count: Maximum number of rectangles per image.
        re_split: Don't erase from the first of `num_aug_splits or 2` equal parts of a batch.
        train_crop_mode: `"rrc"`, `"rkrc"` or `"rkrr"`.
        scale: Range of a random crop's area, as a fraction of the image's area.
        ratio: Range of a random crop's width divided by its height.
        hflip: Probability of a horizontal flip.
        vflip: Probability of a vertical flip.
        color_jitter: Factor for brightness, contrast and saturation; or one for each, and one for hue.
        color_jitter_prob: Probability of colour jitter; None: always.
        grayscale_prob: Probability of a conversion to grey.
        gaussian_blur_prob: Probability of a Gaussian blur.
        auto_augment: A policy, such as `"rand-m9-mstd0.5"`.
        num_aug_repeats: How often a sample comes in an epoch, each time with other random numbers and on another rank.
            Then an epoch has fewer samples, but not fewer batches, as with timm's `RepeatAugSampler`. 0 is 1.
        num_aug_splits: If more than 0, the transform has timm's three parts, for timm's `AugMixDataset`.
        interpolation: `"bilinear"`, `"bicubic"`, `"random"` or another one that timm knows.
        mean: Mean per channel, of pixels from 0 to 1.
        std: Standard deviation per channel, of pixels from 0 to 1.
        num_workers: Number of worker processes of this rank; 0: the calling thread builds the batches.
        distributed: Split the dataset over the ranks of torch.distributed or of the launcher. All ranks get the same
            number of samples; to that end, some samples may come twice at the end of an epoch.
        crop_pct: In evaluation: fraction of the resized image that is kept.
        crop_mode: `"center"`, `"border"` or `"squash"`.
        crop_border_pixels: Number of pixels to cut off at each side of an image first.
        collate_fn: The default is `fast_collate` with the prefetcher, `tensor_collate` without it.
        pin_memory: Without the prefetcher: deliver batches in page-locked memory. With it, batches are always copied
            from page-locked memory.
        fp16: The same as `img_dtype=torch.float16`.
        img_dtype: With the prefetcher: dtype of the images.
        device: With the prefetcher: where batches go. The default is the current accelerator, else the CPU.
        use_prefetcher: True: normalise and erase on the device. False: do so in the workers; batches stay on the host.
        use_multi_epochs_loader: Accepted, without effect: workers always persist.
        persistent_workers: Accepted, without effect: workers always persist.
        worker_seeding: `"all"` or `"part"`. Both have no effect: random numbers are keyed by sample; of iterable
            datasets, by worker.
        tf_preprocessing: Resize and crop with TensorFlow, which must be installed.
        input_size_choices: In training: sizes of images, in the form of `input_size`. Each batch gets one of them, the
            same on all ranks, as with timm's `ScheduledBatchSampler`.
        batch_size_choices: Samples per batch, for each size of images. The default is `batch_size` for all.
        batch_choice_weights: How often each size of images is chosen, relative to the others. The default is equally.
        batch_choice_seed: Seed of the choices. The same seed gives timm's choices.
        batch_choice_schedule: `"constant"`, or `"progressive"`: from the first size to the last in the course of a run.
        batch_schedule_epochs: How many epochs a progressive run has.
        batch_schedule_spread: Standard deviation of the progressive choice, in sizes. 0: the nearest size.
        batch_schedule_random_mix: Fraction of progressive choices that are made at random.
        num_batches: Batches per epoch. In training, a map-style dataset begins again if it has fewer samples. In
            evaluation and for iterable datasets, there may be fewer batches.
        channels_last: With the prefetcher: whether images have torch's channels_last memory format.
        seed: Seed of all randomness. The default is the seed passed to `torch.manual_seed`, if the program called it.
        nearby_shuffle: See `SwiftLoader`, also for all that follow. 0 shuffles over the whole dataset, as timm does.
        in_order: Deliver batches in order.
        on_error: What to do with a sample that raises.
        max_errors: How many samples of an epoch may raise.
        timeout: Maximum time that a worker may take for a batch, in seconds.
        worker_restarts: How many times in a row a worker is replaced.
        unknown: Refused.

    Returns:
        A `PrefetchLoader`; without the prefetcher, the SwiftLoader itself. With `num_aug_repeats`,
        `input_size_choices`, `num_batches` or an iterable dataset, it is an `EpochLoader` instead, which has the same
        interface.

    Raises:
        ImportError: timm isn't installed.
        TypeError: An option is unknown, the dataset has no `transform`, or a value has the wrong type.
        ValueError: A value isn't supported or is out of range.
    """
    given = dict(locals())
    refuse_unknown(given.pop("unknown"), "create_loader", create_loader)
    _check_dataset(dataset)
    _check_options(given)
    # Erasing leaves out the first half of a batch; with augmentation splits, the first split, which is the clean one.
    given["re_num_splits"] = (num_aug_splits or 2) if re_split else 0
    loader = _make_source(given)
    if not use_prefetcher:
        return loader
    re_prob = re_prob if is_training and not no_aug else 0.0
    channels = count_channels(input_size, mean)
    return PrefetchLoader(loader, **taken_by(PrefetchLoader, given, channels=channels, re_prob=re_prob))


def _make_source(given: Mapping[str, Any]) -> SwiftLoader | EpochLoader:
    """Set the dataset's transform, and return a loader of it. If it can't be made, the dataset is as it was."""
    make, dataset = _import_create_transform(), given["dataset"]
    options = taken_by(make, given, separate=given["num_aug_splits"] > 0)
    choices = None if given["input_size_choices"] is None else SizeChoices.of(given)
    if choices is not None:
        transforms = [make(**{**options, "input_size": size}) for size in choices.image_sizes]
        loader: SwiftLoader | EpochLoader = make_sampled(given, choices, transforms)
        dataset.transform = None  # the size is chosen for each batch, so the images are transformed after the dataset
        return loader
    transform = make(**options)
    if isinstance(dataset, IterableDataset):
        loader = make_stream(given)
    else:
        loader = make_native(given) if is_native(given) else make_sampled(given, None, [])
    dataset.transform = transform
    if isinstance(loader, SwiftLoader):
        loader.prepare()  # a new interpreter takes seconds to import torch and timm
    return loader


def _check_dataset(dataset: Any) -> None:
    """Raise if a dataset has no samples or no transform."""
    name = type(dataset).__name__
    if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"the dataset, a {name}, has no __getitem__, and isn't an IterableDataset of torch; give one of these, "
            f"such as timm's ImageDataset"
        )
    if not hasattr(dataset, "transform"):
        raise TypeError(
            f"the dataset, a {name}, has no attribute 'transform', which create_loader sets; add one and call it with "
            f"each image, as timm's ImageDataset does"
        )


def _check_options(given: Mapping[str, Any]) -> None:
    """Raise for options that are out of their range, or that exclude each other."""
    _check_repeats(given)
    worker_seeding = given["worker_seeding"]
    if worker_seeding not in _WORKER_SEEDINGS:
        raise ValueError(
            f"worker_seeding={worker_seeding!r} isn't supported, because random numbers are keyed by sample, not by "
            f"worker; leave it out, and pass seed, which all random numbers depend on"
        )
    if given["input_size_choices"] is None:
        refuse_choices(given)
        return
    reasons = {
        "is_training=False": not given["is_training"],
        "an iterable dataset": isinstance(given["dataset"], IterableDataset),
        f"num_aug_splits={given['num_aug_splits']}": given["num_aug_splits"] > 0,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise ValueError(
                f"input_size_choices={given['input_size_choices']!r} isn't supported with {reason}; it is for training "
                f"on a map-style dataset without augmentation splits: leave it out"
            )


def _check_repeats(given: Mapping[str, Any]) -> None:
    num_repeats = given["num_aug_repeats"]
    if isinstance(num_repeats, bool) or not isinstance(num_repeats, Real):
        raise TypeError(
            f"num_aug_repeats={num_repeats!r} is a {type(num_repeats).__name__}; it must be 0 or a number from 1 on"
        )
    if num_repeats and not 1 <= float(num_repeats) < inf:  # timm's own scripts pass floats
        raise ValueError(f"num_aug_repeats={num_repeats} isn't a number of repeats; it must be 0, or at least 1")
    if float(num_repeats) > 1 and isinstance(given["dataset"], IterableDataset):
        raise ValueError(
            f"num_aug_repeats={num_repeats} isn't supported with an iterable dataset, whose samples have no index; it "
            f"must be 0 or 1: repeat the samples in the dataset"
        )


def _import_create_transform() -> Callable[..., Any]:
    try:
        from timm.data import create_transform
    except ImportError as error:
        raise ImportError(
            f"create_loader makes timm's transforms, but {error}; pip install timm torchvision"
        ) from error
    return create_transform  # type: ignore[no-any-return]
