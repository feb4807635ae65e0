from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate as torch_collate

from swift_loader.batch.collate import BatchMemory
from swift_loader.vision import fast_collate, tensor_collate
from tests.support.helpers import run_script
from tests.unit.vision.conftest import assert_same


class NotingMemory(BatchMemory):
    """Knows which tensors were made there."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def empty_tensor(self, shape: tuple[int, ...], dtype: torch.dtype, /) -> torch.Tensor:
        tensor = super().empty_tensor(shape, dtype)
        self.tensors.append(tensor)
        return tensor

    def made(self, thing: Any) -> bool:
        return any(thing is tensor for tensor in self.tensors)


def picture(number: int, shape: tuple[int, ...] = (3, 5, 4)) -> Any:
    return np.random.default_rng(number).integers(0, 256, shape, np.uint8)


def as_pillow_has_it(array: Any) -> torch.Tensor:
    """Return the same picture with its channels side by side in memory."""
    return torch.from_numpy(array.transpose(1, 2, 0).copy()).permute(2, 0, 1)


IMAGES: dict[str, Callable[[Any], Any]] = {
    "arrays": lambda array: array,
    "tensors": torch.from_numpy,
    "permuted": as_pillow_has_it,
}
TARGETS: dict[str, Callable[[int], Any]] = {
    "int": int,
    "bool": lambda number: number % 2 == 0,
    "float": lambda number: number + 0.5,
    "numpy": np.int32,
    "tensor": torch.tensor,
    "array": lambda number: np.full(2, number, np.float32),
    "dense": lambda number: torch.full((3,), number / 2),
}


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_a_batch_is_the_one_that_timm_makes(timm_data: Any, num_splits: int) -> None:
    for image, target in product(IMAGES.values(), TARGETS.values()):
        samples = []
        for number in range(4):
            splits = tuple(image(picture(10 * number + split)) for split in range(num_splits or 1))
            samples.append((splits if num_splits else splits[0], target(number)))
        for ours, theirs in zip(fast_collate(samples), timm_data.loader.fast_collate(samples), strict=True):
            assert_same(ours, theirs)


def test_batches_are_made_in_the_memory_that_they_are_sent_in() -> None:
    memory = NotingMemory()
    assert all(map(memory.made, fast_collate([(picture(1), 1), (picture(2), 2)], memory)))
    images, targets = tensor_collate([(picture(1) / 255, 1), (picture(2) / 255, 2)], memory=memory)
    assert memory.made(images)
    assert images.dtype == torch.float64
    assert targets.tolist() == [1, 2]


def test_what_else_a_sample_has_is_left_out_as_by_timm() -> None:
    assert len(fast_collate([(picture(1), 1, "name")])) == 2


@pytest.mark.parametrize(
    ("samples", "error", "message"),
    [
        ([], ValueError, "a batch of no samples can't be collated"),
        ([picture(1)], TypeError, r"sample 0 of the batch is a ndarray; it must be a tuple \(image, target\)"),
        (
            [(picture(1), 1), (picture(1, (3, 5, 9)), 1)],
            ValueError,
            r"sample 1 of the batch has an image of shape \(3, 5, 9\), but sample 0 has one of \(3, 5, 4\)",
        ),
        (
            [((picture(1), picture(1)), 1), ((picture(1), picture(1, (1, 5, 4))), 1)],
            ValueError,
            r"sample 1 of the batch has an image of shape \(1, 5, 4\)",
        ),
        ([((picture(1),), 1), ((picture(1), picture(2)), 1)], ValueError, "sample 1 of the batch has 2 images"),
        ([((), 1)], ValueError, "sample 0 of the batch has 0 images"),
        ([(picture(1), 1), (torch.ones(3, 5, 4), 1)], TypeError, r"sample 1 .* an image of type torch\.float32"),
        ([("text", 1)], TypeError, "sample 0 of the batch has an image of type str"),
        ([(picture(1), "cat")], TypeError, "sample 0 of the batch has a target of type str"),
    ],
)
def test_samples_that_make_no_batch_are_named(samples: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fast_collate(samples)


@pytest.mark.parametrize("target", TARGETS)
def test_finished_samples_are_collated_as_by_torch(target: str) -> None:
    samples = [(torch.full((3, 2, 2), number / 3), TARGETS[target](number)) for number in range(4)]
    ours = tensor_collate(samples)
    assert type(ours) is tuple
    for mine, theirs in zip(ours, torch_collate(samples), strict=True):
        assert_same(mine, theirs)


def test_a_worker_imports_neither_torch_nor_timm_for_a_collate_it_does_not_use(tmp_path: Path) -> None:
    code = """
    import sys
    from swift_loader.vision import fast_collate
    print([name for name in ("torch", "timm", "torchvision", "PIL") if name in sys.modules])
    """
    assert run_script(code, via="-c", folder=tmp_path).strip() == "[]"
