"""`create_loader`: makes a loader with timm's transforms from timm's options. Runs in the trainer.

It imports timm when it is called. Most options make a SwiftLoader: it computes a batch's indices, its workers persist,
and a sample's random numbers depend on seed, epoch and the sample. For what needs another order or has none, timm
chooses samplers and options, and a DataLoader of this package takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from math import inf
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch.utils.data import IterableDataset, RandomSampler

from swift_loader.checks import check_integer
from swift_loader.dataloader.dataloader import DataLoader
from swift_loader.integrations import converted
from swift_loader.loader import SwiftLoader
from swift_loader.options import refuse_unknown
from swift_loader.ranks.ranks import expected_ranks, find_ranks
from swift_loader.sampling.permutation import Purpose, derive_key
from swift_loader.vision.collate import fast_collate, tensor_collate
from swift_loader.vision.prefetch import IMAGENET_MEAN, IMAGENET_STD, PrefetchLoader


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
        num_aug_repeats: In training: how often a sample comes in an epoch, each time with other random numbers and on
            another rank, by timm's `RepeatAugSampler`. An epoch has fewer samples, but not fewer batches. 0 is 1. More
            than 1 needs `distributed` and torch.distributed.
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
        persistent_workers: A SwiftLoader's workers always persist. False: those of a DataLoader end with each epoch.
        worker_seeding: `"all"` or `"part"`, without effect: random numbers are keyed by sample; of streams, by worker.
        tf_preprocessing: Resize and crop with TensorFlow, which must be installed.
        input_size_choices: In training: sizes of images, in the form of `input_size`. Each batch gets one of them, the
            same on all ranks, by timm's `ScheduledBatchSampler`.
        batch_size_choices: Samples per batch, for each size of images. The default is `batch_size` for all.
        batch_choice_weights: How often each size of images is chosen, relative to the others. The default is equally.
        batch_choice_seed: Seed of the choices.
        batch_choice_schedule: `"constant"`, or `"progressive"`: from the first size to the last in the course of a run.
        batch_schedule_epochs: How many epochs a progressive run has.
        batch_schedule_spread: Standard deviation of the progressive choice, in sizes. 0: the nearest size.
        batch_schedule_random_mix: Fraction of progressive choices that are made at random.
        num_batches: With `input_size_choices`: batches per epoch. The dataset begins again if it has fewer samples.
        channels_last: With the prefetcher: True delivers images in torch's channels_last memory format.
        seed: Seed of all randomness. Default: that of torch's generator. In timm's order, it is a DataLoader's
            [`seed`](dataloader.md#random-draws), plus the rank.
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
        `input_size_choices` or an iterable dataset, it is a `swift_loader.DataLoader` instead, in
        [timm's order](images.md#repeats-several-sizes-and-streams), which also has `set_epoch` and `close`.

    Raises:
        ImportError: timm isn't installed, or has no such option.
        TypeError: An option is unknown, the dataset has no `transform`, or a value has the wrong type.
        ValueError: A value isn't supported or is out of range.
    """
    given = dict(locals())
    refuse_unknown(given.pop("unknown"), "create_loader", create_loader)
    is_stream, has_sizes = isinstance(dataset, IterableDataset), input_size_choices is not None
    if not hasattr(dataset, "transform") or not (is_stream or hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"the dataset, a {type(dataset).__name__}, needs an attribute 'transform', which create_loader sets and it "
            f"calls with each image; and __getitem__, or to be an IterableDataset of torch. Give one such as "
            f"timm's ImageDataset"
        )
    # timm's own scripts pass floats.
    if not isinstance(num_aug_repeats, (int, float)) or (num_aug_repeats and not 1 <= num_aug_repeats < inf):
        raise ValueError(f"num_aug_repeats={num_aug_repeats!r} isn't a number of repeats; it must be 0, or at least 1")
    is_repeated = is_training and num_aug_repeats > 1
    if is_repeated and (is_stream or not distributed):
        raise ValueError(
            f"num_aug_repeats={num_aug_repeats!r} needs distributed=True and a map-style dataset, because it gives "
            f"each sample to several ranks; leave it out"
        )
    if worker_seeding not in ("all", "part"):
        raise ValueError(
            f"worker_seeding={worker_seeding!r} isn't supported, because random numbers are keyed by sample, not by "
            f"worker; leave it out, and pass seed, which all random numbers depend on"
        )
    for option in ("batch_size_choices", "batch_choice_weights", "num_batches"):
        if given[option] is not None and not has_sizes:
            raise ValueError(f"{option}={given[option]!r} needs input_size_choices, as with timm; give both or none")
    try:
        from timm.data import create_loader as create
        from timm.data import create_transform
    except ImportError as error:
        raise ImportError(
            f"create_loader makes timm's transforms, but {error}; pip install timm torchvision"
        ) from error
    given["channels"] = input_size[0] if np.size(input_size) == 3 else len(mean)  # type: ignore[index] # noqa: PLR2004
    # Erasing leaves out the first half of a batch; with augmentation splits, the first split, which is the clean one.
    given["re_num_splits"] = (num_aug_splits or 2) if re_split else 0
    given["collate_fn"] = collate_fn or (fast_collate if use_prefetcher else tensor_collate)
    given["num_aug_repeats"] = num_aug_repeats if is_repeated else 0
    if is_stream or has_sizes or is_repeated:
        reason = "an iterable dataset" if is_stream else "input_size_choices" if has_sizes else "num_aug_repeats"
        loader: SwiftLoader | ImageLoader = _make_image_loader(given, reason, create)
    else:
        transform = create_transform(**_taken_by(create_transform, given, separate=num_aug_splits > 0))
        loader = SwiftLoader(
            **_taken_by(
                SwiftLoader,
                given,
                nb_consumer=None if distributed else 1,
                worker_per_consumer=num_workers,
                shuffle=is_training,
                drop_last=is_training,
                pin_memory=pin_memory and not use_prefetcher,
            )
        )
        dataset.transform = transform
        loader.prepare()  # a new interpreter takes seconds to import torch and timm
    if not use_prefetcher:
        return loader
    return PrefetchLoader(
        loader, **_taken_by(PrefetchLoader, given, re_prob=re_prob if is_training and not no_aug else 0.0)
    )


def _make_image_loader(given: Mapping[str, Any], reason: str, create: Callable[..., Any]) -> Any:
    """Return a loader of the dataset, samplers and options that timm's own `create_loader` chooses."""
    parameters = signature(create_loader).parameters
    for name in ("nearby_shuffle", "on_error", "max_errors"):
        if given[name] != parameters[name].default:
            raise ValueError(
                f"{name}={given[name]!r} isn't supported with {reason}, with which timm makes the order; leave it out"
            )
    options = {  # what has its default may be unknown to an older timm
        name: given[name]
        for name, parameter in parameters.items()
        if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD and given[name] is not parameter.default
    }
    loader = create(**{**options, "device": torch.device("cpu"), "use_multi_epochs_loader": False})
    loader = loader.loader if given["use_prefetcher"] else loader
    rank = find_ranks(None, None).rank if given["distributed"] else 0
    seed = None if given["seed"] is None else check_integer("seed", given["seed"], 0) + rank  # so repeats differ
    generator = None if seed is None else torch.Generator()
    if isinstance(sampler := getattr(loader.batch_sampler, "sampler", None), RandomSampler):
        sampler.generator = generator
    vars(loader).update(
        seed=seed,
        generator=generator,
        in_order=given["in_order"],
        worker_restarts=given["worker_restarts"],
        timeout=(given["timeout"] or 0) if given["num_workers"] else 0,
        pin_memory=(
            torch.device(given["device"] or "cuda").type == "cuda" and torch.cuda.is_available()
            if given["use_prefetcher"]  # it copies to a GPU from page-locked memory
            else given["pin_memory"]
        ),
    )
    return converted(loader, ImageLoader)


class ImageLoader(DataLoader[Any]):
    """A DataLoader of timm's order, with what training loops call."""

    def device_key(self) -> int:
        """Return the key of the last batch, see `device.prefetch.batch_key`. For a `DevicePrefetcher`."""
        epoch: Any = self._latest
        place = epoch.number, epoch.num_yielded - 1, expected_ranks(None).rank
        return derive_key(epoch.draws.begun.base_seed, Purpose.DEVICE.value, *place)


def _taken_by(callee: Callable[..., Any], given: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """Return those of the given options that a function has, too: they mean the same. `others` come first."""
    names = signature(callee).parameters
    return {**{name: value for name, value in given.items() if name in names}, **others}
