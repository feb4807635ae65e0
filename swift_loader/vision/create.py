"""`create_loader`: makes a SwiftLoader with timm's transforms from timm's options. Runs in the trainer.

It imports timm when it is called. timm's samplers, worker seeds and loader classes aren't needed: a batch's indices are
computed, workers always persist from epoch to epoch, and a sample's random numbers depend on (seed, epoch, index).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
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
_CHOICES = ("input_size_choices", "batch_size_choices", "batch_choice_weights")


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
) -> PrefetchLoader | SwiftLoader:
    """Set timm's transform on a dataset, and return a loader of it. Starts no worker.

    Args:
        dataset: A map-style dataset whose samples are `(image, target)`. Its attribute `transform` is set.
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
        num_aug_repeats: 0 or 1; both mean that each sample comes once per epoch. Other values aren't supported.
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
        worker_seeding: `"all"` or `"part"`. Both have no effect: random numbers are keyed by sample.
        tf_preprocessing: Resize and crop with TensorFlow, which must be installed.
        input_size_choices: Must be None: all batches have images of the same size.
        batch_size_choices: Must be None: all batches have the same size.
        batch_choice_weights: Must be None.
        batch_choice_seed: Accepted, without effect, as are the `batch_choice` and `batch_schedule` options below.
        batch_choice_schedule: Accepted, without effect.
        batch_schedule_epochs: Accepted, without effect.
        batch_schedule_spread: Accepted, without effect.
        batch_schedule_random_mix: Accepted, without effect.
        num_batches: Must be None: an epoch has as many batches as the dataset gives.
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
        A `PrefetchLoader`; without the prefetcher, the SwiftLoader itself.

    Raises:
        ImportError: timm isn't installed.
        TypeError: An option is unknown, the dataset is iterable-style or has no `transform`, or a value has the wrong
            type.
        ValueError: A value isn't supported or is out of range.
    """
    given = dict(locals())
    refuse_unknown(given.pop("unknown"), "create_loader", create_loader)
    _check_dataset(dataset)
    _check_unsupported(given)
    # Erasing leaves out the first half of a batch; with augmentation splits, the first split, which is the clean one.
    given["re_num_splits"] = (num_aug_splits or 2) if re_split else 0
    create_transform = _import_create_transform()
    transform = create_transform(**_taken_by(create_transform, given, separate=num_aug_splits > 0))
    loader = SwiftLoader(
        **_taken_by(
            SwiftLoader,
            given,
            nb_consumer=None if distributed else 1,
            worker_per_consumer=num_workers,
            shuffle=is_training,
            drop_last=is_training,
            collate_fn=collate_fn or (fast_collate if use_prefetcher else tensor_collate),
            pin_memory=pin_memory and not use_prefetcher,
        )
    )
    dataset.transform = transform
    loader.prepare()  # a new interpreter takes seconds to import torch and timm
    if not use_prefetcher:
        return loader
    re_prob = re_prob if is_training and not no_aug else 0.0
    channels = _count_channels(input_size, mean)
    return PrefetchLoader(loader, **_taken_by(PrefetchLoader, given, channels=channels, re_prob=re_prob))


def _taken_by(callee: Callable[..., Any], given: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """Return those of the given options that a function has, too: they mean the same. `others` come first."""
    names = signature(callee).parameters
    return {**{name: value for name, value in given.items() if name in names}, **others}


def _check_dataset(dataset: Any) -> None:
    """Raise if a dataset can't be indexed or has no transform."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"the dataset, a {name}, is iterable-style; create_loader takes map-style datasets, whose samples have an "
            f"index: use timm's ImageDataset, or wrap a torch DataLoader of this dataset in a PrefetchLoader"
        )
    if not hasattr(dataset, "transform"):
        raise TypeError(
            f"the dataset, a {name}, has no attribute 'transform', which create_loader sets; add one and call it with "
            f"each image, as timm's ImageDataset does"
        )


def _check_unsupported(given: Mapping[str, Any]) -> None:
    """Raise for timm's options that this loader doesn't support."""
    num_aug_repeats, worker_seeding = given["num_aug_repeats"], given["worker_seeding"]
    if not isinstance(num_aug_repeats, Real):
        raise TypeError(f"num_aug_repeats={num_aug_repeats!r} is a {type(num_aug_repeats).__name__}; it must be 0 or 1")
    if num_aug_repeats not in (0, 1):  # timm's own scripts pass floats
        raise ValueError(
            f"num_aug_repeats={num_aug_repeats} isn't supported, because no sample comes twice in an epoch; leave it "
            f"out, or repeat the samples in the dataset, with an index for each repeat"
        )
    if worker_seeding not in _WORKER_SEEDINGS:
        raise ValueError(
            f"worker_seeding={worker_seeding!r} isn't supported, because random numbers are keyed by sample, not by "
            f"worker; leave it out, and pass seed, which all random numbers depend on"
        )
    for name in _CHOICES:
        if given[name] is not None:
            raise ValueError(
                f"{name}={given[name]!r} isn't supported: all batches have the same batch_size and input_size; leave "
                f"it out, or make one loader per size"
            )
    if given["num_batches"] is not None:
        raise ValueError(
            f"num_batches={given['num_batches']!r} isn't supported: an epoch has as many batches as the dataset gives; "
            f"leave it out, and break out of the loop after that many batches"
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
