from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from swift_loader.vision import RandomErasing
from tests.unit.vision.conftest import assert_same, seed_everything

KEYS = (0, 1, 2**63 + 5, 2**64 - 1)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def erased_by_timm(timm_data: Any, images: torch.Tensor, key: int, *arguments: Any, **options: Any) -> torch.Tensor:
    seed_everything(key)
    erase = timm_data.random_erasing.RandomErasing(*arguments, device="cpu", **options)
    result: torch.Tensor = erase(images.clone())
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_splits", [0, 1, 2, 3])
@pytest.mark.parametrize("max_count", [1, 3])
@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
def test_a_key_erases_what_timm_erases_after_seeding_with_it(
    timm_data: Any, mode: str, max_count: int, num_splits: int, dtype: torch.dtype
) -> None:
    images = noise(7, 3, 32, 24, dtype=dtype)
    for key in KEYS:
        options: dict[str, Any] = {"mode": mode, "max_count": max_count, "num_splits": num_splits}
        theirs = erased_by_timm(timm_data, images, key, 0.7, **options)
        ours = RandomErasing(0.7, **options)(images.clone(), key)
        assert_same(ours, theirs)


@pytest.mark.parametrize("shape", [(3, 32, 24), (4, 1, 7, 50), (4, 3, 2, 2), (3, 2, 1, 9), (0, 3, 8, 8)])
@pytest.mark.parametrize("arguments", [(1.0,), (0.0,), (0.5, 0.1, 0.9, 0.2, 2.0, "pixel", 2, 4), (1, 1, 3)])
def test_so_it_does_for_any_shape_and_range(timm_data: Any, shape: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
    images = noise(*shape)
    for key in KEYS:
        theirs = erased_by_timm(timm_data, images, key, *arguments)
        assert_same(RandomErasing(*arguments)(images.clone(), key), theirs)


def test_the_global_generators_are_not_touched() -> None:
    before = random.getstate(), torch.get_rng_state()
    RandomErasing(1.0, mode="pixel")(noise(4, 3, 16, 16), 1)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "noise"}, r"mode='noise' is unknown; it must be one of 'const', 'rand', 'pixel'"),
        ({"probability": 1.5}, r"probability=1\.5 isn't a probability; it must be between 0 and 1"),
        ({"min_area": 0.5, "max_area": 0.4}, r"min_area=0\.5 and max_area=0\.4 aren't a range of areas"),
        ({"min_aspect": 2.0}, r"min_aspect=2\.0 and max_aspect=0\.5 aren't a range of aspect ratios"),
        ({"min_count": 3, "max_count": 2}, r"min_count=3 and max_count=2 aren't a range of counts"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RandomErasing(**options)


def test_what_is_no_batch_of_normalised_images_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the shape \(3, 8\); it must be \(B, C, H, W\)"):
        RandomErasing()(noise(3, 8), 0)
    with pytest.raises(TypeError, match=r"images are torch\.uint8; they must be floating-point"):
        RandomErasing()(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), 0)
