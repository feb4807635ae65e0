from __future__ import annotations

import collections
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.batch.tree import (
    children,
    find_unencodable,
    map_children,
    parts,
    rebuilt,
    search,
    steps,
    type_name,
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


def test_a_type_is_named_with_its_module() -> None:
    assert type_name(3) == "int"
    assert type_name(Node()) == f"{__name__}.Node"


def test_the_innermost_part_is_found() -> None:
    path, part, error = find_unencodable([1, {"a": (2, 3j)}], ValueError("outer"), Attempts(1, 2))
    assert (path, part) == ("[1]['a'][1]", 3j)
    assert repr(error) == "TypeError('bad')"


def test_a_batch_whose_parts_are_all_fine_is_to_blame_itself() -> None:
    batch = [1, 2]
    path, part, error = find_unencodable(batch, ValueError("outer"), Attempts(1, 2))
    assert path == ""
    assert part is batch
    assert repr(error) == "ValueError('outer')"


def test_a_list_that_holds_itself_ends() -> None:
    batch: list[Any] = []
    batch.append(batch)
    assert find_unencodable(batch, ValueError("outer"), Attempts())[1] is batch


def test_children_that_know_their_parent_end() -> None:
    root, child = Node(), Node()
    root.children.append(child)
    child.parent = root
    child.children.append(3j)
    path, part, _ = find_unencodable({"tree": root}, ValueError("outer"), Attempts(None))
    assert (path, part) == ("['tree'].children[0].children[0]", 3j)


def test_an_object_that_can_be_called_is_looked_into() -> None:
    class Transform:
        def __init__(self) -> None:
            self.inner = 3j

        def __call__(self) -> None: ...

    assert find_unencodable([Transform()], ValueError("outer"), Attempts())[0] == "[0].inner"


KEYS = st.one_of(st.integers(), st.text(max_size=3))


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
    return -thing if isinstance(thing, int) else map_children(thing, negated)


@given(containers_of(TREES))
def test_a_container_is_its_children_put_together_again(container: Any) -> None:
    values = children(container)
    assert values is not None
    made = rebuilt(container, list(values))
    assert type(made) is type(container)
    assert made == container
    assert len(list(steps(container))) == len(values)


@given(containers_of(TREES))
def test_each_step_leads_to_its_child(container: Any) -> None:
    for step, child in parts(container):
        assert eval("container" + step) is child


@given(TREES)
def test_mapping_twice_gives_the_same_and_changes_nothing(tree: Any) -> None:
    before = repr(tree)
    assert negated(negated(tree)) == tree
    assert repr(tree) == before
    assert repr(negated(tree)).replace("-", "") == before.replace("-", "")


@given(TREES)
def test_what_is_searched_for_is_found_by_following_the_children(tree: Any) -> None:
    def pairs_in(thing: Any) -> list[int]:
        if isinstance(thing, Pair):
            return [id(thing)]
        return [found for child in children(thing) or () for found in pairs_in(child)]

    found = [id(pair) for pair in search(tree, lambda thing: isinstance(thing, Pair))]
    assert found == list(dict.fromkeys(pairs_in(tree)))


def test_a_leaf_has_no_children_and_stays() -> None:
    for leaf in (3, "text", b"bytes", None, {1, 2}, Pair, np.ones(2), range(3), len):
        assert children(leaf) is None
        assert map_children(leaf, pytest.fail) is leaf
