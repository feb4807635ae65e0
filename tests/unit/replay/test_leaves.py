"""What is said of the parts of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from swift_loader.replay import checksum
from swift_loader.replay.leaves import leaves_of

BATCH = {"x": torch.zeros(2, 3), "ids": [1, "two"], "nothing": None, "array": np.ones(2)}

EMPTY: list[Any] = [[], {}, (), [[]]]


def test_each_leaf_has_its_path_and_kind() -> None:
    assert [(leaf.path, leaf.kind) for leaf in leaves_of(BATCH)] == [
        ("['x']", "torch.float32 (2, 3)"),
        ("['ids'][0]", "int"),
        ("['ids'][1]", "str"),
        ("['nothing']", "NoneType"),
        ("['array']", "float64 (2,)"),
    ]


@pytest.mark.parametrize(
    "other",
    [
        {**BATCH, "x": torch.zeros(3, 2)},
        {**BATCH, "x": torch.zeros(2, 3).double()},
        {**BATCH, "x": torch.tensor([[0, 0, 0], [0, 0, -0.0]])},
        {**BATCH, "ids": [1, "to"]},
        {**BATCH, "ids": (1,)},
        {**BATCH, "array": torch.ones(2).double()},
        {**BATCH, "more": 1},
    ],
)
def test_any_difference_is_another_checksum(other: Any) -> None:
    assert checksum(BATCH) == checksum(dict(BATCH)) != checksum(other)


def test_a_view_has_the_checksum_of_its_values() -> None:
    assert checksum(torch.arange(6).reshape(2, 3).T) == checksum(torch.tensor([[0, 3], [1, 4], [2, 5]]))


@pytest.mark.parametrize(
    ("part", "rows"),
    [
        (torch.tensor([[1.0, 2.0], [torch.nan, 0.0], [torch.inf, 1.0]]), (1, 2)),
        (torch.tensor([1.0, torch.nan]).to(torch.bfloat16), (1,)),
        (torch.tensor([1e300], dtype=torch.float64), ()),
        (np.array([1.0, np.nan, -np.inf], np.float16), (1, 2)),
        (np.array([1, complex(0, np.nan)]), (1,)),
        (torch.tensor(torch.nan), (0,)),
        (np.float32(1), ()),
        (torch.zeros(0, 3), ()),
        (torch.zeros(3, 0), ()),
        (torch.tensor([1, 2]), ()),
        (np.array(["text"]), ()),
        (np.array([None]), ()),
        (torch.tensor([True]), ()),
        ("text", ()),
    ],
)
def test_samples_that_are_not_finite_are_found(part: Any, rows: tuple[int, ...]) -> None:
    (leaf,) = leaves_of(part)
    assert leaf.not_finite == rows


def test_empty_containers_count() -> None:
    assert len({checksum(part) for part in EMPTY}) == 4
