from __future__ import annotations

import collections
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from swift_loader.device.move import to_device
from tests.support.containers import FrozenPair, Pair, Point

CPU = torch.device("cpu")
META = torch.device("meta")
"""Stands for a GPU: what is there is not here."""


class Box(collections.UserDict[str, Any]):
    """A mapping with more to it."""

    def __init__(self, data: dict[str, Any], note: str) -> None:
        super().__init__(data)
        self.note = note


class Mover:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to(self, device: torch.device) -> Mover:
        return Mover(device)


def test_numeric_arrays_become_tensors_with_their_values() -> None:
    for dtype in "?bBhHiIqQefdFD":
        array = np.array([[0, 1], [1, 0]], dtype)[::-1]
        moved = to_device(array, CPU)
        assert isinstance(moved, torch.Tensor)
        assert moved.numpy().dtype == array.dtype
        assert moved.tolist() == array.tolist()
        assert to_device(array, META).device == META


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "b"]),
        np.array([b"a"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.array([3], "m8[s]"),
        np.array([None, 1], object),
        np.array([1, 2], ">i4"),
        np.array([1.5], np.longdouble),
        np.zeros(2, [("a", "i4")]),
    ],
    ids=lambda array: array.dtype.str,
)
def test_arrays_that_torch_cannot_have_stay_arrays(array: Any) -> None:
    assert to_device(array, META) is array


@pytest.mark.parametrize("value", [None, 3, 1.5, "text", b"bytes", True, {1, 2}, range(3), int, np.float32(3)])
def test_everything_else_stays_as_it_is(value: object) -> None:
    assert to_device(value, META) is value


@pytest.mark.parametrize(
    "wrap",
    [
        lambda leaf: [leaf, 1],
        lambda leaf: (leaf, 1),
        lambda leaf: {"key": leaf},
        lambda leaf: collections.OrderedDict(key=leaf, other=1),
        lambda leaf: collections.defaultdict(list, key=leaf),
        lambda leaf: MappingProxyType({"key": leaf}),
        lambda leaf: Point(leaf, 1),
        lambda leaf: Pair(leaf, "text"),
        lambda leaf: FrozenPair(leaf, "text"),
        lambda leaf: [{"a": (Point(1, Pair(leaf, None)),)}],
    ],
    ids=["list", "tuple", "dict", "OrderedDict", "defaultdict", "proxy", "namedtuple", "dataclass", "frozen", "nested"],
)
def test_containers_keep_their_type_at_any_depth(wrap: Any) -> None:
    leaf = torch.arange(3)
    batch = wrap(leaf)
    moved = to_device(batch, META)
    assert type(moved) is type(batch)
    assert "meta" in repr(moved)
    assert "meta" not in repr(batch)


def test_a_mapping_keeps_what_else_it_has() -> None:
    batch = Box({"a": torch.ones(1)}, "note")
    moved = to_device(batch, META)
    assert type(moved) is Box
    assert moved.note == "note"
    assert moved["a"].device == META
    assert batch["a"].device == CPU


def test_packed_sequences_know_what_of_them_stays_on_the_cpu() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    moved = to_device(packed, META)
    assert type(moved) is type(packed)
    assert moved.data.device == META
    assert moved.batch_sizes.device == CPU


def test_tensors_of_other_processes_memory_are_not_copied_on_the_cpu() -> None:
    array = np.arange(3)
    moved = to_device(array, CPU)
    array[0] = 7
    assert moved[0] == 7


class Told(torch.Tensor):
    """Remembers how it was asked to move."""

    told: list[Any]

    def to(self, *args: Any, **options: Any) -> torch.Tensor:
        self.told.append(options["non_blocking"])
        return torch.zeros(1)


@pytest.mark.parametrize(("device", "does_not_wait"), [("cuda", True), ("xpu", True), ("mps", False), ("cpu", False)])
def test_only_copies_whose_end_an_event_tells_are_not_waited_for(device: str, does_not_wait: bool) -> None:
    tensor = torch.ones(1).as_subclass(Told)
    tensor.told = []
    to_device([tensor], torch.device(device))
    assert tensor.told == [does_not_wait]
