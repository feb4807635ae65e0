"""The sizes of images and batches from which each batch of `create_loader` gets one, and the options that choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from numbers import Real
from typing import Any

from swift_loader.checks import check_choice, check_integer

__all__ = ["ChoiceSchedule", "SizeChoices", "count_channels", "refuse_choices"]

ImageSize = tuple[int, int, int]
"""`(C, H, W)`."""

_NUM_CHW = 3


class ChoiceSchedule(str, Enum):
    """How the chances of the sizes change from epoch to epoch."""

    CONSTANT = "constant"
    """They don't."""
    PROGRESSIVE = "progressive"
    """They move from the first size to the last."""


@dataclass(frozen=True, slots=True)
class SizeChoices:
    """What each batch gets one of."""

    image_sizes: tuple[ImageSize, ...]
    batch_sizes: tuple[int, ...]
    """Samples of a batch, for each image size."""
    options: dict[str, Any]
    """How to choose: options of timm's `ScheduledBatchSampler`."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SizeChoices:
        """Return the choices that the arguments of `create_loader` describe.

        Raises:
            TypeError: A value has the wrong type.
            ValueError: A value is out of its range, or there isn't one for each image size.
        """
        sizes = given["input_size_choices"]
        if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not sizes:
            raise ValueError(
                f"input_size_choices={sizes!r} has no sizes; give a list of at least one, such as [192, 224]"
            )
        channels = count_channels(given["input_size"], given["mean"])
        batch_sizes = given["batch_size_choices"]
        if batch_sizes is None:
            batch_sizes = [given["batch_size"]] * len(sizes)
        _check_count("batch_size_choices", batch_sizes, len(sizes))
        return cls(
            tuple(_image_size(size, channels) for size in sizes),
            tuple(check_integer("a value of batch_size_choices", size, 1) for size in batch_sizes),
            {
                "choice_weights": _weights(given["batch_choice_weights"], len(sizes)),
                "seed": check_integer("batch_choice_seed", given["batch_choice_seed"], 0),
                "num_batches": given["num_batches"],
                **_schedule(given, len(sizes)),
            },
        )


def refuse_choices(given: Mapping[str, Any]) -> None:
    """Raise ValueError if batch sizes or weights were given without the image sizes that they are for."""
    for name in ("batch_size_choices", "batch_choice_weights"):
        if given[name] is not None:
            raise ValueError(
                f"{name}={given[name]!r} needs input_size_choices, because it has one value for each image size; give "
                f"both or none"
            )


def count_channels(input_size: int | Sequence[int], mean: Sequence[float]) -> int:
    """Return the number of channels of the images."""
    is_complete = isinstance(input_size, (tuple, list)) and len(input_size) == _NUM_CHW
    return input_size[0] if is_complete else len(mean)  # type: ignore[index]


def _image_size(size: Any, channels: int) -> ImageSize:
    whole = [channels, size, size] if isinstance(size, int) else list(size)
    if len(whole) == _NUM_CHW - 1:
        whole = [channels, *whole]
    if len(whole) != _NUM_CHW or whole[0] != channels:
        raise ValueError(
            f"input_size_choices has the size {size!r}; each must be the side of a square, (H, W), or (C, H, W) with "
            f"C={channels}, as in input_size"
        )
    for side in whole:
        check_integer("a side in input_size_choices", side, 1)
    return whole[0], whole[1], whole[2]


def _weights(weights: Any, num_sizes: int) -> list[float] | None:
    if weights is None:
        return None
    _check_count("batch_choice_weights", weights, num_sizes)
    if not all(isinstance(weight, Real) and 0 <= float(weight) < inf for weight in weights) or not sum(weights):
        raise ValueError(
            f"batch_choice_weights={weights!r} aren't weights; none may be negative, and one must be over 0"
        )
    return [float(weight) for weight in weights]


def _schedule(given: Mapping[str, Any], num_sizes: int) -> dict[str, Any]:
    kind = check_choice("batch_choice_schedule", given["batch_choice_schedule"], ChoiceSchedule)
    if kind is ChoiceSchedule.CONSTANT:
        return {}
    spread, mix = given["batch_schedule_spread"], given["batch_schedule_random_mix"]
    if num_sizes == 1:
        raise ValueError("batch_choice_schedule='progressive' needs at least two sizes in input_size_choices, not 1")
    if given["batch_schedule_epochs"] is None:
        raise ValueError("batch_choice_schedule='progressive' needs batch_schedule_epochs: the epochs of the whole run")
    if not 0 <= spread < inf:
        raise ValueError(f"batch_schedule_spread={spread!r} isn't a deviation; it must be at least 0")
    if not 0 <= mix <= 1:
        raise ValueError(f"batch_schedule_random_mix={mix!r} isn't a fraction; it must be from 0 to 1")
    return {
        "choice_schedule": kind.value,
        "schedule_epochs": check_integer("batch_schedule_epochs", given["batch_schedule_epochs"], 1),
        "schedule_spread": spread,
        "schedule_random_mix": mix,
    }


def _check_count(name: str, values: Sequence[Any], num_sizes: int) -> None:
    if len(values) != num_sizes:
        raise ValueError(
            f"{name}={values!r} has {len(values)} values, but input_size_choices has {num_sizes}; give one for each"
        )
