from __future__ import annotations

import collections
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from swift_loader.device.transfer import tensors_in


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Point:
    x: Any
    y: Any


@dataclass
class Masked:
    """Has an attribute that is no field."""

    x: Any

    def __init__(self, x: Any, mask: Any) -> None:
        self.x = x
        self.mask = mask


class Named(list[Any]):
    """A list with an attribute."""

    def __init__(self, items: list[Any], more: Any) -> None:
        super().__init__(items)
        self.more = more


class Movable:
    """A batch of a library: its tensors are attributes."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)

    def to(self, device: torch.device) -> Movable:
        return self


class Slotted:
    """One whose attributes are slots."""

    __slots__ = ("b",)

    def __init__(self, b: Any) -> None:
        self.b = b

    def to(self, device: torch.device) -> Slotted:
        return self


def test_tensors_are_found_in_any_structure() -> None:
    tensors = [torch.tensor(number) for number in range(16)]
    batch = {
        "list": [tensors[0], (tensors[1], None)],
        "pair": Pair(tensors[2], "text"),
        "point": Point(tensors[3], np.ones(2)),
        "user dict": collections.UserDict(a=tensors[4]),
        "movable": Movable(a=tensors[5], inner=Slotted(tensors[6]), name="x"),
        "type": torch.Tensor,
        "array": np.ones(3),
        "set": {tensors[7]},
        8: tensors[8],
        "namespace": SimpleNamespace(a=tensors[9]),
        "deque": collections.deque([tensors[10]]),
        "user list": collections.UserList([tensors[11]]),
        "masked": Masked(tensors[12], tensors[13]),
        "list with more to it": Named([tensors[14]], tensors[15]),
        "function": len,
        "module": np,
    }
    found = sorted(int(tensor) for tensor in tensors_in(batch))
    assert found == list(range(16))


def test_a_structure_that_contains_itself_ends() -> None:
    loop: list[Any] = [torch.tensor(1)]
    loop.append(loop)
    assert [int(tensor) for tensor in tensors_in(loop)] == [1]
