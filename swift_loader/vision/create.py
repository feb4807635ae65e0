"""`create_loader`: timm's options to a SwiftLoader of timm's transforms. In the trainer; imports timm when called.

timm's samplers, worker seeds and loader classes have no counterpart: which samples a batch has is pure arithmetic,
workers always stay from epoch to epoch, and what a sample draws depends on (seed, epoch, index).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch.utils.data import IterableDataset

from swift_loader.loader import SwiftLoader
from swift_loader.unknown_options import refuse_unknown
from swift_loader.vision.collate import fast_collate, tensor_collate
from swift_loader.vision.prefetch import PrefetchLoader
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
    use_multi_epochs_loader: bool = False,  # noqa: ARG001 - timm's; what it is for is always so
    persistent_workers: bool = True,  # noqa: ARG001 - likewise
    worker_seeding: str = "all",
    tf_preprocessing: bool = False,
    input_size_choices: Sequence[Any] | None = None,
    batch_size_choices: Sequence[int] | None = None,
    batch_choice_weights: Sequence[float] | None = None,
    batch_choice_seed: int = 0,  # noqa: ARG001 - these are about choices, which aren't supported
    batch_choice_schedule: str = "constant",  # noqa: ARG001
    batch_schedule_epochs: int | None = None,  # noqa: ARG001
    batch_schedule_spread: float = 0.65,  # noqa: ARG001
    batch_schedule_random_mix: float = 0.1,  # noqa: ARG001
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
) -> PrefetchLoader | SwiftLoader:
    """Give a dataset timm's transform, and return a loader of it; starts nothing.

    Args:
        dataset: Map-style, with an attribute `transform`, which is set. Its samples are `(image, target)`.
        input_size: `(C, H, W)`, `(H, W)`, or one side.
        batch_size: Samples per batch and rank.
        is_training: Shuffle, augment, and leave out an incomplete last batch.
        no_aug: Without augmentation, also when training.
        re_prob: Random erasing, when training, as are all the following up to `num_aug_splits`: its probability.
        re_mode: What it fills with, see `RandomErasing.mode`.
        re_count: At most how many rectangles per image.
        re_split: Leave the first of `num_aug_splits or 2` equal parts of a batch alone.
        train_crop_mode: `"rrc"`, `"rkrc"` or `"rkrr"`.
        scale: Of random crops: area, as a fraction.
        ratio: Of random crops: width by height.
        hflip: Probability of a horizontal flip.
        vflip: Of a vertical one.
        color_jitter: Factor for brightness, contrast and saturation, or one for each, and for hue.
        color_jitter_prob: None: always.
        grayscale_prob: Probability of grey.
        gaussian_blur_prob: Of a blur.
        auto_augment: A policy, such as `"rand-m9-mstd0.5"`.
        num_aug_repeats: 0 or 1, which both mean that a sample comes once in an epoch; others aren't supported.
        num_aug_splits: More than 0: the transform is timm's three parts, for timm's `AugMixDataset`.
        interpolation: `"bilinear"`, `"bicubic"`, `"random"` and others that timm knows.
        mean: Of pixels from 0 to 1, per channel.
        std: Likewise.
        num_workers: Worker processes of this rank; 0 builds batches in the calling thread.
        distributed: Split the dataset over the ranks of torch.distributed or the launcher. Equally many samples for
            each: some are repeated at the end.
        crop_pct: When evaluating: how much of the resized image is kept.
        crop_mode: `"center"`, `"border"` or `"squash"`.
        crop_border_pixels: Cut off around each image first.
        collate_fn: By default `fast_collate` with the prefetcher, `tensor_collate` without.
        pin_memory: Without the prefetcher: deliver in page-locked memory. With it, batches are copied from such memory
            in any case.
        fp16: The same as `img_dtype=torch.float16`.
        img_dtype: Of the images, with the prefetcher.
        device: Where to, with the prefetcher; by default the current accelerator, else the CPU.
        use_prefetcher: Normalise and erase on the device. False: in the workers; batches stay on the host.
        use_multi_epochs_loader: Accepted. Workers always stay.
        persistent_workers: Accepted. Workers always stay.
        worker_seeding: `"all"` or `"part"`, which are the same here: draws are keyed by sample.
        tf_preprocessing: TensorFlow's way to resize and crop; needs tensorflow.
        input_size_choices: None: all batches have one size of images; others aren't supported.
        batch_size_choices: None: all batches have one size; others aren't supported.
        batch_choice_weights: None; others aren't supported.
        batch_choice_seed: Accepted, as are all `batch_choice` and `batch_schedule` options: without choices they do
            nothing.
        batch_choice_schedule: Likewise.
        batch_schedule_epochs: Likewise.
        batch_schedule_spread: Likewise.
        batch_schedule_random_mix: Likewise.
        num_batches: None: as many as the dataset has; others aren't supported.
        channels_last: Whether images have their channels side by side in memory, with the prefetcher.
        seed: Base of all randomness; by default what the program gave to `torch.manual_seed`, if it did.
        nearby_shuffle: See `SwiftLoader`, as for all that follow; 0 shuffles over the whole dataset, as timm does.
        in_order: Deliver batches in order.
        on_error: What becomes of a sample that raises.
        max_errors: How many may, per epoch.
        timeout: Seconds that a worker may take for a batch.
        worker_restarts: How many times in a row a worker is replaced.
        unknown: Refused.

    Returns:
        A `PrefetchLoader`, or, without the prefetcher, the SwiftLoader itself.

    Raises:
        ImportError: timm isn't installed.
        TypeError: An unknown option, a dataset that is iterable-style or has no `transform`, or a value of the wrong
            type.
        ValueError: What isn't supported, or a value out of its range.
    """
    refuse_unknown(unknown, "create_loader", create_loader)
    _check_dataset(dataset)
    _check_unsupported(num_aug_repeats, worker_seeding)
    _check_no_choices(
        input_size_choices=input_size_choices,
        batch_size_choices=batch_size_choices,
        batch_choice_weights=batch_choice_weights,
    )
    if num_batches is not None:
        raise ValueError(
            f"num_batches={num_batches!r} isn't supported: an epoch has the batches that the dataset has; leave it "
            f"out, and break from the loop after so many"
        )
    # Erasing spares the first half of a batch; with augmentation splits, the first of them, which is the clean one.
    re_num_splits = (num_aug_splits or 2) if re_split else 0
    transform = _import_create_transform()(
        input_size,
        is_training=is_training,
        no_aug=no_aug,
        train_crop_mode=train_crop_mode,
        scale=scale,
        ratio=ratio,
        hflip=hflip,
        vflip=vflip,
        color_jitter=color_jitter,
        color_jitter_prob=color_jitter_prob,
        grayscale_prob=grayscale_prob,
        gaussian_blur_prob=gaussian_blur_prob,
        auto_augment=auto_augment,
        interpolation=interpolation,
        mean=mean,
        std=std,
        crop_pct=crop_pct,
        crop_mode=crop_mode,
        crop_border_pixels=crop_border_pixels,
        re_prob=re_prob,
        re_mode=re_mode,
        re_count=re_count,
        re_num_splits=re_num_splits,
        tf_preprocessing=tf_preprocessing,
        use_prefetcher=use_prefetcher,
        separate=num_aug_splits > 0,
    )
    loader = SwiftLoader(
        dataset=dataset,
        batch_size=batch_size,
        nb_consumer=None if distributed else 1,
        worker_per_consumer=num_workers,
        shuffle=is_training,
        seed=seed,
        drop_last=is_training,
        in_order=in_order,
        timeout=timeout,
        worker_restarts=worker_restarts,
        nearby_shuffle=nearby_shuffle,
        on_error=on_error,
        max_errors=max_errors,
        collate_fn=collate_fn or (fast_collate if use_prefetcher else tensor_collate),
        pin_memory=pin_memory and not use_prefetcher,
    )
    dataset.transform = transform
    loader.prepare()  # a fresh interpreter takes seconds to import torch and timm
    if not use_prefetcher:
        return loader
    return PrefetchLoader(
        loader,
        mean=mean,
        std=std,
        channels=_count_channels(input_size, mean),
        device=device,
        img_dtype=img_dtype,
        fp16=fp16,
        re_prob=re_prob if is_training and not no_aug else 0.0,
        re_mode=re_mode,
        re_count=re_count,
        re_num_splits=re_num_splits,
        channels_last=channels_last,
    )


def _check_dataset(dataset: Any) -> None:
    """Refuse a dataset that can't be indexed, or given a transform."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"the dataset, a {name}, is iterable-style; create_loader takes map-style datasets, whose samples have an "
            f"index: use timm's ImageDataset, or a PrefetchLoader around a torch DataLoader of this one"
        )
    if not hasattr(dataset, "transform"):
        raise TypeError(
            f"the dataset, a {name}, has no attribute 'transform', which create_loader sets; give it one, which it "
            f"calls with each image, as timm's ImageDataset does"
        )


def _check_unsupported(num_aug_repeats: Any, worker_seeding: Any) -> None:
    """Refuse what timm has, and this doesn't."""
    if not isinstance(num_aug_repeats, Real):
        raise TypeError(f"num_aug_repeats={num_aug_repeats!r} is a {type(num_aug_repeats).__name__}; it must be 0 or 1")
    if num_aug_repeats not in (0, 1):  # timm's own scripts give floats
        raise ValueError(
            f"num_aug_repeats={num_aug_repeats} isn't supported, as no sample comes twice in an epoch; leave it out, "
            f"or have the dataset repeat its samples, with an index for each repeat"
        )
    if worker_seeding not in _WORKER_SEEDINGS:
        raise ValueError(
            f"worker_seeding={worker_seeding!r} isn't supported, as draws are keyed by sample, not by worker; leave it "
            f"out, and give seed, from which all draws follow"
        )


def _check_no_choices(**choices: Any) -> None:
    """Refuse batches of several sizes."""
    for name, value in choices.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} isn't supported: which samples a batch has follows from one batch_size; leave it "
                f"out, or make a loader for each size"
            )


def _import_create_transform() -> Callable[..., Any]:
    try:
        from timm.data import create_transform
    except ImportError as error:
        raise ImportError(
            f"create_loader makes timm's transforms, but {error}; pip install timm torchvision"
        ) from error
    return create_transform  # type: ignore[no-any-return]


def _count_channels(input_size: int | tuple[int, ...], mean: Sequence[float]) -> int:
    is_complete = isinstance(input_size, (tuple, list)) and len(input_size) == 3  # noqa: PLR2004 - (C, H, W)
    return input_size[0] if is_complete else len(mean)  # type: ignore[index]
