"""Containers of each kind that a batch may have."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Pair:
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class FrozenPair:
    left: Any
    right: Any


class Shelf(MutableMapping[str, Any]):
    """Keeps its items in a dict that a shallow copy shares."""

    def __init__(self, items: dict[str, Any] | None = None) -> None:
        self.items_of = dict(items or {})

    def __getitem__(self, key: str) -> Any:
        return self.items_of[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_of[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_of[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of)

    def __len__(self) -> int:
        return len(self.items_of)
