"""`create_loader`: makes a loader with timm's transforms from timm's options. Runs in the trainer.

It imports timm when it is called. timm's worker seeds and loader classes aren't needed: a batch's indices are computed,
workers always persist from epoch to epoch, and a sample's random numbers depend on seed, epoch and the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from math import inf
from numbers import Real
from typing import Any, Literal, NoReturn

import torch
from torch.utils.data import IterableDataset

from swift_loader.checks import check_flag, check_optional_integer, check_seconds
from swift_loader.executors.processes import warm_up
from swift_loader.loader import SwiftLoader
from swift_loader.options import refuse_unknown
from swift_loader.samplers.base import ranks_of
from swift_loader.sampling.mixture import Mixture
from swift_loader.vision.collate import KeyedImages, fast_collate, tensor_collate
from swift_loader.vision.image_loader import ImageBatches, ImageLoader, num_items_of
from swift_loader.vision.prefetch import IMAGENET_MEAN, IMAGENET_STD, PrefetchLoader
from swift_loader.worker.spec import StartMethod, modules_of

_NATIVE_ONLY = {"in_order": True, "on_error": "raise", "max_errors": None, "worker_restarts": 3}
"""Options that only a SwiftLoader has, and their defaults."""


def create_loader(  # noqa: PLR0917 - timm's, in timm's order
    dataset: Any,
    input_size: int | tuple[int, int] | tuple[int, int, int],
    batch_size: int,
    is_training: bool = False,
    no_aug: bool = False,
    re_prob: float = 0.0,
    re_mode: Literal["const", "rand", "pixel"] = "const",
    re_count: int = 1,
    re_split: bool = False,
    train_crop_mode: Literal["rrc", "rkrc", "rkrr"] | None = None,
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
    crop_mode: Literal["center", "border", "squash"] | None = None,
    crop_border_pixels: int | None = None,
    collate_fn: Callable[..., Any] | None = None,
    pin_memory: bool = False,
    fp16: bool = False,
    img_dtype: torch.dtype = torch.float32,
    device: torch.device | str | int | None = None,
    use_prefetcher: bool = True,
    use_multi_epochs_loader: bool = False,
    persistent_workers: bool = True,
    worker_seeding: Literal["all", "part"] = "all",
    tf_preprocessing: bool = False,
    input_size_choices: Sequence[Any] | None = None,
    batch_size_choices: Sequence[int] | None = None,
    batch_choice_weights: Sequence[float] | None = None,
    batch_choice_seed: int = 0,
    batch_choice_schedule: Literal["constant", "progressive"] = "constant",
    batch_schedule_epochs: int | None = None,
    batch_schedule_spread: float = 0.65,
    batch_schedule_random_mix: float = 0.1,
    num_batches: int | None = None,
    *,
    channels_last: bool = False,
    seed: int | None = None,
    nearby_shuffle: int = 0,
    in_order: bool = True,
    on_error: Literal["raise", "skip", "replace"] = "raise",
    max_errors: float | None = None,
    timeout: float | None = None,
    worker_restarts: int = 3,
    **unknown: NoReturn,
) -> PrefetchLoader | SwiftLoader | ImageLoader:
    """Set timm's transform on a dataset, and return a loader of it. Starts no worker.

    Args:
        dataset: Map-style or an `IterableDataset`, of `(image, target)`. Its attribute `transform` is set.
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
            number of samples, so some may come twice at the end of an epoch.
        crop_pct: In evaluation: fraction of the resized image that is kept.
        crop_mode: `"center"`, `"border"` or `"squash"`.
        crop_border_pixels: Number of pixels to cut off at each side of an image first.
        collate_fn: The default is `fast_collate` with the prefetcher, `tensor_collate` without it.
        pin_memory: Without the prefetcher: deliver batches in page-locked memory. With it, they always come from there.
        fp16: The same as `img_dtype=torch.float16`.
        img_dtype: With the prefetcher: dtype of the images.
        device: With the prefetcher: where batches go. The default is the current accelerator, else the CPU.
        use_prefetcher: True: normalise and erase on the device. False: do so in the workers; batches stay on the host.
        use_multi_epochs_loader: Accepted, without effect: workers always persist.
        persistent_workers: Accepted, without effect: workers always persist.
        worker_seeding: `"all"` or `"part"`, without effect: random numbers are keyed by sample; of streams, by worker.
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
        channels_last: With the prefetcher: True delivers images in torch's channels_last memory format.
        seed: Seed of all randomness. Default: that of torch's generator.
        nearby_shuffle: How many samples are [shuffled together](randomness.md#order). 0: the whole dataset, as with
            timm.
        in_order: True delivers batches in a fixed order. False delivers them as soon as they are ready.
        on_error: What happens to a sample that [raises](failures.md#a-sample-fails), as for `SwiftLoader`.
        max_errors: How many samples may fail in an epoch, as for `SwiftLoader`. None: no limit.
        timeout: Seconds that a worker may spend on a batch before it is [killed and
            replaced](failures.md#a-worker-hangs). None or 0: no limit.
        worker_restarts: How many times in a row a [dead worker](failures.md#a-worker-dies) is replaced.
        unknown: Refused.

    Returns:
        A `PrefetchLoader`; without the prefetcher, the SwiftLoader itself. With `num_aug_repeats`,
        `input_size_choices`, `num_batches` or an iterable dataset, it is a `swift_loader.DataLoader` instead, which
        also has `set_epoch` and `close`.

    Raises:
        ImportError: timm isn't installed, or has no such option.
        TypeError: An option is unknown, the dataset has no `transform`, or a value has the wrong type.
        ValueError: A value isn't supported or is out of range.
    """
    given = dict(locals())
    refuse_unknown(given.pop("unknown"), "create_loader", create_loader)
    _check(given)
    is_complete = isinstance(input_size, (tuple, list)) and len(input_size) == 3  # noqa: PLR2004 - (C, H, W)
    given["channels"] = input_size[0] if is_complete else len(mean)  # type: ignore[index]
    # Erasing leaves out the first half of a batch; with augmentation splits, the first split, which is the clean one.
    given["re_num_splits"] = (num_aug_splits or 2) if re_split else 0
    given["collate_fn"] = collate_fn or (fast_collate if use_prefetcher else tensor_collate)
    loader = _make_source(given)
    if not use_prefetcher:
        return loader
    re_prob = re_prob if is_training and not no_aug else 0.0
    return PrefetchLoader(loader, **_taken_by(PrefetchLoader, given, re_prob=re_prob))


def _make_source(given: Mapping[str, Any]) -> SwiftLoader | ImageLoader:
    """Set the dataset's transform, and return a loader of it. If it can't be made, the dataset is as it was."""
    try:
        from timm.data import create_transform
    except ImportError as error:
        raise ImportError(
            f"create_loader makes timm's transforms, but {error}; pip install timm torchvision"
        ) from error
    dataset, is_training = given["dataset"], given["is_training"]
    options = _taken_by(create_transform, given, separate=given["num_aug_splits"] > 0)
    is_stream, has_sizes = isinstance(dataset, IterableDataset), given["input_size_choices"] is not None
    transform = None if has_sizes else create_transform(**options)
    is_repeated = is_training and given["num_aug_repeats"] > 1
    if is_stream or has_sizes or is_repeated or given["num_batches"] is not None:
        if isinstance(dataset, Mixture):
            raise TypeError("a Mixture has no num_aug_repeats, input_size_choices and num_batches; leave them out")
        loader: SwiftLoader | ImageLoader = _make_image_loader(given, options)
    else:
        loader = SwiftLoader(
            **_taken_by(
                SwiftLoader,
                given,
                nb_consumer=None if given["distributed"] else 1,
                worker_per_consumer=given["num_workers"],
                shuffle=is_training,
                drop_last=is_training,
                pin_memory=given["pin_memory"] and not given["use_prefetcher"],
            )
        )
    dataset.transform = transform
    if isinstance(loader, SwiftLoader):
        loader.prepare()  # a new interpreter takes seconds to import torch and timm
    return loader


def _make_image_loader(given: Mapping[str, Any], options: Mapping[str, Any]) -> ImageLoader:
    """Return a loader of a stream, or of batches that a SwiftLoader doesn't make."""
    for name, default in _NATIVE_ONLY.items():
        if given[name] != default:
            raise ValueError(
                f"{name}={given[name]!r} isn't supported with num_aug_repeats, input_size_choices, num_batches or an "
                f"iterable dataset; it must be {default!r}: leave it out"
            )
    dataset, is_training, num_workers = given["dataset"], given["is_training"], given["num_workers"]
    ranks = ranks_of(None, None) if given["distributed"] else ranks_of(1, 0)
    num_batches = check_optional_integer("num_batches", given["num_batches"], 1)
    timeout = check_seconds("timeout", given["timeout"])
    if isinstance(dataset, IterableDataset):
        if callable(configure := getattr(dataset, "set_loader_cfg", None)):
            configure(num_workers=num_workers)  # timm's datasets estimate their length by it
        batching: dict[str, Any] = {"batch_size": given["batch_size"], "drop_last": is_training, "shard_stream": False}
    else:
        num_repeats, sizes = float(given["num_aug_repeats"] or 1) if is_training else 1.0, None
        if given["input_size_choices"] is not None:
            dataset, sizes = _with_sizes(given, options, num_items_of(len(dataset), ranks, num_repeats))
        batches = ImageBatches(
            len(dataset),
            given["batch_size"],
            ranks,
            given["seed"],
            is_training=check_flag("is_training", is_training),
            window=given["nearby_shuffle"],
            num_repeats=num_repeats,
            num_batches=num_batches,
            sizes=sizes,
        )
        dataset, batching = KeyedImages(dataset), {"batch_sampler": batches}
    if num_workers:  # the DataLoader may not see what is inside the dataset
        warm_up(StartMethod.TEMPLATE, modules_of(type(given["dataset"])))
    # A prefetcher to a GPU copies from page-locked memory.
    device = "cuda" if given["device"] is None else given["device"]
    to_gpu = torch.cuda.is_available() and torch.device(device).type == "cuda"
    return ImageLoader(
        dataset,
        ranks,
        given["seed"],
        num_batches,
        **batching,
        num_workers=num_workers,
        collate_fn=given["collate_fn"],
        pin_memory=to_gpu if given["use_prefetcher"] else given["pin_memory"],
        timeout=timeout if timeout is not None and num_workers else 0,
        rng=None,
    )


def _with_sizes(given: Mapping[str, Any], options: Mapping[str, Any], num_items: int) -> tuple[Any, Any]:
    """Return the dataset with one transform for each size of images, and the sampler that chooses the sizes."""
    try:
        from timm.data import create_transform
        from timm.data.scheduled_sampler import ScheduledBatchSampler, ScheduledTransformDataset
    except ImportError as error:
        raise ImportError(f"input_size_choices needs a newer timm: pip install -U timm ({error})") from error
    sizes = [_image_size(size, given["channels"]) for size in given["input_size_choices"]]
    batch_sizes = given["batch_size_choices"]
    if batch_sizes is None:
        batch_sizes = [given["batch_size"]] * len(sizes)
    if len(batch_sizes) != len(sizes):
        raise ValueError(
            f"batch_size_choices={batch_sizes!r} has {len(batch_sizes)} values, but input_size_choices has "
            f"{len(sizes)}; give one for each"
        )
    if given["num_batches"] is None and min(batch_sizes) > num_items:
        raise ValueError(
            f"batches of {batch_sizes} samples don't fit into an epoch of {num_items} samples per rank; give "
            f"smaller ones in batch_size_choices"
        )
    chosen = ScheduledBatchSampler(
        range(num_items),  # only the sizes of its batches count
        batch_sizes,
        choice_weights=given["batch_choice_weights"],
        seed=given["batch_choice_seed"],
        num_batches=given["num_batches"],
        choice_schedule=given["batch_choice_schedule"],
        schedule_epochs=given["batch_schedule_epochs"],
        schedule_spread=given["batch_schedule_spread"],
        schedule_random_mix=given["batch_schedule_random_mix"],
    )
    transforms = [create_transform(**{**options, "input_size": size}) for size in sizes]
    return ScheduledTransformDataset(given["dataset"], transforms), chosen


def _image_size(size: Any, channels: int) -> tuple[int, ...]:
    """Return one of `input_size_choices` as `(C, H, W)`."""
    whole = (channels, size, size) if isinstance(size, int) else (channels, *size)[-3:]
    if len(whole) != 3 or whole[0] != channels or min(whole) < 1:  # noqa: PLR2004 - (C, H, W)
        raise ValueError(
            f"input_size_choices has the size {size!r}; each must be the side of a square, (H, W), or (C, H, W) with "
            f"C={channels}, as in input_size"
        )
    return whole


def _taken_by(callee: Callable[..., Any], given: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """Return those of the given options that a function has, too: they mean the same. `others` come first."""
    names = signature(callee).parameters
    return {**{name: value for name, value in given.items() if name in names}, **others}


def _check(given: Mapping[str, Any]) -> None:
    """Raise for a dataset or options that can't be used, or that exclude each other."""
    dataset, is_stream = given["dataset"], isinstance(given["dataset"], IterableDataset)
    name = type(dataset).__name__
    if not is_stream and not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"the dataset, a {name}, has no __getitem__, and isn't an IterableDataset of torch; give one of these, "
            f"such as timm's ImageDataset"
        )
    if not hasattr(dataset, "transform"):
        raise TypeError(
            f"the dataset, a {name}, has no attribute 'transform', which create_loader sets; add one and call it with "
            f"each image, as timm's ImageDataset does"
        )
    repeats, sizes = given["num_aug_repeats"], given["input_size_choices"]
    if not isinstance(repeats, Real) or (repeats and not 1 <= float(repeats) < inf):  # timm's own scripts pass floats
        raise ValueError(f"num_aug_repeats={repeats!r} isn't a number of repeats; it must be 0, or at least 1")
    if given["worker_seeding"] not in ("all", "part"):
        raise ValueError(
            f"worker_seeding={given['worker_seeding']!r} isn't supported, because random numbers are keyed by sample, "
            f"not by worker; leave it out, and pass seed, which all random numbers depend on"
        )
    for option in ("num_aug_repeats", "nearby_shuffle"):
        if is_stream and given[option] not in (0, 1):
            raise ValueError(
                f"{option}={given[option]!r} isn't supported with an iterable dataset, whose samples have no index; "
                f"leave it out, and do so in the dataset"
            )
    for option in ("batch_size_choices", "batch_choice_weights"):
        if sizes is None and given[option] is not None:
            raise ValueError(
                f"{option}={given[option]!r} needs input_size_choices, because it has one value for each image size; "
                f"give both or none"
            )
    reasons = {
        "is_training=False": not given["is_training"],
        "an iterable dataset": is_stream,
        f"num_aug_splits={given['num_aug_splits']}": given["num_aug_splits"] > 0,
        "no sizes in it": not sizes,
    }
    for reason, is_so in reasons.items():
        if sizes is not None and is_so:
            raise ValueError(
                f"input_size_choices={sizes!r} isn't supported with {reason}; it is for training on a map-style "
                f"dataset without augmentation splits: leave it out"
            )
