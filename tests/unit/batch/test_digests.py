"""Two samples are compared by value, and the first leaf that differs is named."""

from __future__ import annotations

import pickle
from collections import OrderedDict, deque
from dataclasses import dataclass
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from swift_loader.batch.digests import difference


@dataclass
class Box:
    """A container."""

    xy: Any
    name: str = "box"


class Plain:
    """Has no `==` of its own."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Marked(torch.Tensor):
    """Has an attribute, too."""


def marked(mark: int, *values: float) -> torch.Tensor:
    tensor = torch.tensor(values).as_subclass(Marked)
    tensor.mark = mark  # type: ignore[attr-defined]
    return tensor


NAN = float("nan")
EQUAL: list[Any] = [
    {"a": [1, NAN, (2, "x", None)], "b": {3, "y", frozenset([4])}},
    np.array([1.0, NAN]),
    np.array([(1, NAN)], "i4, f8"),
    np.array(["a", None, 2], object),
    np.ma.masked_equal([1, 2], 2),
    np.datetime64("NaT"),
    torch.tensor([NAN, 1], dtype=torch.bfloat16),
    torch.eye(2).to_sparse(),
    marked(1, NAN),
    Box(np.arange(3)),
    Plain(inner=Plain(x=torch.arange(2)), when=Decimal("1.5")),
    [PurePosixPath("/a"), OrderedDict(a=1), deque([1]), torch.Size([1]), torch.float16, np.dtype("f4"), range(3)],
    torch.Generator().manual_seed(1),
    {"set of": {Plain}, "code": default_collate},
]


@pytest.mark.parametrize("sample", EQUAL)
def test_a_sample_equals_its_copies(sample: Any) -> None:
    assert difference(sample, pickle.loads(pickle.dumps(sample))) is None
    cyclic, other = list[Any](), list[Any]()
    cyclic.append(cyclic)
    other.append(other)
    assert difference(cyclic, other) is None


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({"x": [1, 2.5]}, {"x": [1, 2.25]}, ("['x'][1]", "2.5", "2.25")),
        (1, True, ("", "1", "True")),
        (Box(np.arange(4).reshape(2, 2)), Box(np.array([[0, 1], [5, 3]])), (".xy[1, 0]", "2", "5")),
        (np.zeros(2), np.zeros(2, np.float32), ("", "float64 (2,)", "float32 (2,)")),
        (np.zeros(2), torch.zeros(2), ("", "array([0., 0.])", "tensor([0., 0.])")),
        ("a" * 99 + "b", "a" * 99 + "c", ("", repr("a" * 20 + "b"), repr("a" * 20 + "c"))),
        ([1], [1, 2], ("", "of length 1", "of length 2")),
        ({"a": 1}, {"b": 1}, ("", "with the keys ['a']", "['b']")),
        ({1}, {2}, ("", "{1}", "{2}")),
        (marked(1, 2.0), marked(3, 2.0), ("['mark']", "1", "3")),
        (np.ma.masked_equal([1, 2], 2), np.ma.masked_equal([1, 2], 1), None),
        (Plain(x=1), Plain(x=2), None),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2), None),
    ],
)
def test_the_leaf_that_differs_is_named(one: Any, other: Any, found: Any) -> None:
    assert difference(one, other) is not None
    assert found is None or difference(one, other) == found


def test_frames_are_equal_whatever_their_blocks() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 2], "b": [3.0, NAN], "c": ["x", None]})
    other = pandas.DataFrame({"a": [1, 2]})
    other["b"], other["c"] = [3.0, NAN], ["x", None]
    assert difference(frame, other) is None
    assert difference(frame.iloc[0], other.iloc[0]) is None
    assert difference(frame, other.assign(a=[1, 3])) is not None
