from __future__ import annotations

import collections
import random
import weakref
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.batch.tree import (
    children,
    find_unencodable,
    rebuilt,
    search,
    steps,
)
from tests.support.containers import FrozenPair, Pair, Point


class Nothing(NamedTuple): ...


class Items(list[Any]): ...


class Node:
    def __init__(self) -> None:
        self.parent: Node | None = None
        self.children: list[Any] = []


class Attempts:
    """Refuses containers of `bad`, and counts."""

    def __init__(self, *good: object) -> None:
        self._good = good
        self.count = 0

    def __call__(self, part: object) -> None:
        self.count += 1
        if self.count > 1000:
            pytest.fail("the walk goes round in circles")
        if not any(part is good for good in self._good):
            raise TypeError("bad")


def test_the_innermost_part_is_found() -> None:
    path, part, error = find_unencodable([1, {"a": (2, 3j)}], ValueError("outer"), Attempts(1, 2))
    assert (path, part) == ("[1]['a'][1]", 3j)
    assert repr(error) == "TypeError('bad')"


def test_children_that_know_their_parent_end() -> None:
    root, child = Node(), Node()
    root.children.append(child)
    child.parent = root
    child.children.append(3j)
    path, part, _ = find_unencodable({"tree": root}, ValueError("outer"), Attempts(None))
    assert (path, part) == ("['tree'].children[0].children[0]", 3j)


KEYS = st.one_of(st.integers(), st.text(max_size=3))


class Reserved:
    """Takes any attribute for a key, as what `np.load` returns does."""

    def __init__(self, held: object) -> None:
        self.held = held

    def __getattribute__(self, name: str) -> Any:
        raise AttributeError(name)


class Refusing(Mapping[str, Any]):
    """Can't be iterated over."""

    def __init__(self, held: object) -> None:
        self.held = held

    def __getitem__(self, key: str) -> Any:
        raise OSError(key)

    def __iter__(self) -> Iterator[str]:
        raise OSError

    def __len__(self) -> int:
        raise OSError


class Slotted:
    """Has an attribute that isn't set, and one that raises."""

    __slots__ = ("held", "missing")

    def __init__(self, held: object) -> None:
        self.held = held

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize("kind", [Reserved, Refusing, Slotted])
def test_a_search_runs_no_code_of_the_objects_that_it_meets(kind: Any) -> None:
    gone = weakref.proxy(Node())
    whole = [gone, {"x": (kind(wanted := random.Random()), gone)}]
    assert [*search(whole, lambda thing: type(thing) is random.Random)] == [wanted]


def containers_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists, dicts = st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)
    pairs = st.tuples(inner, inner)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(Items),
        pairs.map(lambda pair: Point(*pair)),
        st.just(Nothing()),
        pairs.map(lambda pair: Pair(*pair)),
        pairs.map(lambda pair: FrozenPair(*pair)),
        dicts,
        dicts.map(collections.OrderedDict),
        dicts.map(lambda items: collections.defaultdict(list, items)),
        dicts.map(collections.UserDict),
        dicts.map(MappingProxyType),
    )


LEAVES = st.integers()
TREES = st.recursive(LEAVES, containers_of)


def negated(thing: Any) -> Any:
    values = children(thing)
    return -thing if values is None else rebuilt(thing, [negated(value) for value in values])


@given(containers_of(TREES))
def test_a_container_is_its_children_put_together_again(container: Any) -> None:
    values = children(container)
    assert values is not None
    made = rebuilt(container, list(values))
    assert type(made) is type(container)
    assert made == container
    assert len(list(steps(container))) == len(values)


@given(TREES)
def test_mapping_twice_gives_the_same_and_changes_nothing(tree: Any) -> None:
    before = repr(tree)
    assert negated(negated(tree)) == tree
    assert repr(tree) == before
    assert repr(negated(tree)).replace("-", "") == before.replace("-", "")


def test_a_leaf_has_no_children() -> None:
    for leaf in (3, "text", b"bytes", None, {1, 2}, Pair, np.ones(2), range(3), len):
        assert children(leaf) is None
