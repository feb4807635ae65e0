from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from swift_loader.vision import ImageStage, RandomErasing
from tests.unit.vision.conftest import assert_same, seed_everything

CPU, META = torch.device("cpu"), torch.device("meta")


def make_batch(channels: int = 3, dtype: torch.dtype = torch.uint8) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.randint(0, 256, (4, channels, 16, 12), generator=torch.Generator().manual_seed(1))
    return values.to(dtype), torch.arange(4)


def moved_by_timm(timm_data: Any, batch: Any, key: int = 0, **options: Any) -> Any:
    seed_everything(key)
    return next(iter(timm_data.loader.PrefetchLoader([batch], device=CPU, **options)))


@pytest.mark.parametrize(
    ("source_dtype", "img_dtype"),
    [
        (torch.uint8, None),
        (torch.uint8, torch.float16),
        (torch.int64, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, None),
    ],
)
def test_images_are_normalised_to_the_bits_of_timm(
    timm_data: Any, source_dtype: torch.dtype, img_dtype: torch.dtype | None
) -> None:
    images, targets = make_batch(dtype=source_dtype)
    theirs = moved_by_timm(timm_data, (images.clone(), targets), img_dtype=img_dtype)
    ours = ImageStage(img_dtype=img_dtype)((images, targets), CPU)
    assert_same(ours[0], theirs[0])
    assert_same(ours[1], theirs[1])


@pytest.mark.parametrize(("dtype", "channels_last"), [(torch.uint8, True), (torch.float32, False)])
def test_the_batch_on_the_host_is_not_written(dtype: torch.dtype, channels_last: bool) -> None:
    images, targets = make_batch(dtype=dtype)
    before = images.clone()
    ImageStage(channels_last=channels_last, erasing=RandomErasing(1.0))((images, targets), CPU)
    assert torch.equal(images, before)


def test_lists_and_arrays_become_a_tuple_of_tensors_and_what_comes_further_is_moved() -> None:
    images, targets = make_batch()
    moved = ImageStage()([images.numpy(), targets.numpy(), {"weights": np.ones(4)}, "name"], META)
    assert isinstance(moved, tuple)
    assert [moved[0].device, moved[1].device, moved[2]["weights"].device] == [META] * 3
    assert moved[3] == "name"


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ({"images": 1}, TypeError, r"the batch is a dict; it must be \(images, targets\)"),
        (("a", 1), TypeError, r"the batch's images are a str; they must be an array or a tensor"),
        ((torch.ones(3, 8, 8), 1), ValueError, r"images have the shape \(3, 8, 8\); it must be \(B, C, H, W\)"),
        ((torch.ones(2, 1, 8, 8), 1), ValueError, r"images have 1 channels, but channels=3; pass channels, mean"),
    ],
)
def test_a_batch_of_something_else_is_refused(batch: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ImageStage()(batch, CPU)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"channels": 0}, ValueError, "channels=0 is too small"),
        ({"img_dtype": torch.uint8}, TypeError, r"img_dtype=torch\.uint8 isn't a floating-point dtype"),
        ({"mean": "grey"}, ValueError, "mean='grey' can't normalise images"),
        ({"std": (0.5, float("nan"), 0.5)}, ValueError, "pass one finite number per channel"),
        ({"std": (0.5, 0.0, 0.5)}, ValueError, r"std=\(0\.5, 0\.0, 0\.5\) has values that aren't positive"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ImageStage(**options)
