"""Makes what `create_loader` takes its batches from, out of its arguments.

A SwiftLoader gives each sample once per epoch, in batches of one size. For all else, it is an EpochLoader, around a
DataLoader: repeats, several sizes, a number of batches, and streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch.utils.data import IterableDataset

from swift_loader.checks import check_flag, check_integer, check_optional_integer, check_seconds
from swift_loader.dataloader.dataloader import DataLoader
from swift_loader.executors.processes import warm_up
from swift_loader.loader import SwiftLoader
from swift_loader.ranks.ranks import Ranks
from swift_loader.samplers.base import ranks_of, seed_of
from swift_loader.sampling.shuffle import OrderSettings
from swift_loader.vision.batches import ImageBatches
from swift_loader.vision.collate import fast_collate, tensor_collate
from swift_loader.vision.epochs import EpochLoader
from swift_loader.vision.places import PlacedImages
from swift_loader.vision.schedule import ConstantSchedule, SizeSchedule
from swift_loader.vision.shares import Share
from swift_loader.vision.sizes import SizeChoices
from swift_loader.worker.spec import StartMethod, modules_of

__all__ = ["Transform", "is_native", "is_page_locked", "make_native", "make_sampled", "make_stream", "taken_by"]

Transform = Callable[[Any], Any]

_NATIVE_ONLY = {"in_order": True, "on_error": "raise", "max_errors": None, "worker_restarts": 3}
"""Options that only a SwiftLoader has, and their defaults."""


def is_native(given: Mapping[str, Any]) -> bool:
    """Return whether a SwiftLoader can do it."""
    is_repeated = given["is_training"] and given["num_aug_repeats"] > 1
    return not (
        is_repeated
        or isinstance(given["dataset"], IterableDataset)
        or given["input_size_choices"] is not None
        or given["num_batches"] is not None
    )


def make_native(given: Mapping[str, Any]) -> SwiftLoader:
    """Return a SwiftLoader."""
    return SwiftLoader(
        **taken_by(
            SwiftLoader,
            given,
            nb_consumer=None if given["distributed"] else 1,
            worker_per_consumer=given["num_workers"],
            shuffle=given["is_training"],
            drop_last=given["is_training"],
            collate_fn=_collate_of(given),
            pin_memory=given["pin_memory"] and not given["use_prefetcher"],
        )
    )


def make_sampled(given: Mapping[str, Any], choices: SizeChoices | None, transforms: Sequence[Transform]) -> EpochLoader:
    """Return a loader with a batch sampler.

    Args:
        given: Arguments of `create_loader`.
        choices: The sizes; None: all batches have the same.
        transforms: One for each size of images; none if the dataset transforms them itself.
    """
    _refuse_native_only(given)
    is_training, ranks = check_flag("is_training", given["is_training"]), _ranks(given)
    batch_size = check_integer("batch_size", given["batch_size"], 1)
    window = check_integer("nearby_shuffle", given["nearby_shuffle"], 0)
    seed = seed_of(given["seed"], ranks, is_used=is_training)
    order = OrderSettings.of(seed=seed, shuffle=is_training, window=window, batch_size=batch_size)
    num_repeats = float(given["num_aug_repeats"] or 1) if is_training else 1.0
    share = Share(order, len(given["dataset"]), num_repeats, ranks.world_size, ranks.rank)
    num_batches = _num_batches(given)
    num_items = share.num_items
    if not num_items:
        raise ValueError(f"the dataset has {share.num_samples} samples, too few for {ranks.world_size} ranks; add some")
    if choices is not None:
        schedule: Any = SizeSchedule(num_items, choices.batch_sizes, drop_last=True, **choices.options)
    else:
        if num_batches is not None and not is_training and num_batches * batch_size >= num_items:
            num_batches = None  # nothing comes twice
        schedule = ConstantSchedule(num_items, batch_size, is_training, num_batches)
    images = PlacedImages(given["dataset"], transforms)
    loader: Any = DataLoader(images, batch_sampler=ImageBatches(share, schedule), **_loader_options(given))  # type: ignore[arg-type]
    return _epochs(given, loader, seed, ranks)


def make_stream(given: Mapping[str, Any]) -> EpochLoader:
    """Return a loader of an iterable dataset."""
    _refuse_native_only(given)
    if given["nearby_shuffle"]:
        raise ValueError(
            f"nearby_shuffle={given['nearby_shuffle']!r} isn't supported with an iterable dataset, which has an order "
            f"of its own; leave it out, and shuffle in the dataset"
        )
    dataset, num_workers = given["dataset"], given["num_workers"]
    if callable(configure := getattr(dataset, "set_loader_cfg", None)):
        configure(num_workers=num_workers)  # timm's datasets estimate their length by it
    ranks = _ranks(given)
    seed = seed_of(given["seed"], ranks, is_used=False)
    loader: Any = DataLoader(
        dataset,
        batch_size=given["batch_size"],
        drop_last=given["is_training"],
        shard_stream=False,
        **_loader_options(given),
    )
    return _epochs(given, loader, seed, ranks)


def is_page_locked(given: Mapping[str, Any]) -> bool:
    """Return whether a DataLoader page-locks its batches: for a prefetcher to a GPU, or because the user wants it."""
    if not given["use_prefetcher"]:
        return bool(given["pin_memory"])
    device = given["device"]
    return torch.cuda.is_available() and (device is None or torch.device(device).type == "cuda")


def taken_by(callee: Callable[..., Any], given: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """Return those of the given options that a function has, too: they mean the same. `others` come first."""
    names = signature(callee).parameters
    return {**{name: value for name, value in given.items() if name in names}, **others}


def _epochs(given: Mapping[str, Any], loader: DataLoader[Any], seed: int, ranks: Ranks) -> EpochLoader:
    return EpochLoader(
        loader,
        dataset=given["dataset"],
        batch_size=given["batch_size"],
        seed=seed,
        has_own_seed=given["seed"] is not None,
        rank=ranks.rank,
        num_batches=_num_batches(given),
    )


def _loader_options(given: Mapping[str, Any]) -> dict[str, Any]:
    timeout = check_seconds("timeout", given["timeout"])
    if given["num_workers"]:  # the DataLoader may not see what is inside the dataset
        warm_up(StartMethod.TEMPLATE, modules_of(type(given["dataset"])))
    return {
        "num_workers": given["num_workers"],
        "collate_fn": _collate_of(given),
        "pin_memory": is_page_locked(given),
        "timeout": timeout if timeout is not None and given["num_workers"] else 0,
        "generator": torch.Generator(),
        "rng": None,
    }


def _collate_of(given: Mapping[str, Any]) -> Callable[..., Any]:
    return given["collate_fn"] or (fast_collate if given["use_prefetcher"] else tensor_collate)


def _ranks(given: Mapping[str, Any]) -> Ranks:
    return ranks_of(None, None) if given["distributed"] else ranks_of(1, 0)


def _num_batches(given: Mapping[str, Any]) -> int | None:
    return check_optional_integer("num_batches", given["num_batches"], 1)


def _refuse_native_only(given: Mapping[str, Any]) -> None:
    for name, default in _NATIVE_ONLY.items():
        if given[name] != default:
            raise ValueError(
                f"{name}={given[name]!r} isn't supported with num_aug_repeats, input_size_choices, num_batches or an "
                f"iterable dataset; it must be {default!r}: leave it out"
            )
