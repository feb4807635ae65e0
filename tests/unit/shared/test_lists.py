"""A shared list gives what the list gives that it was made of."""

from __future__ import annotations

import copy
import gc
import operator
import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader import EncodeError, SharedList, SharedMemoryLost
from swift_loader.shared import lists
from swift_loader.shared.lists import LONG, share_lists


class Point(NamedTuple):
    x: Any
    y: Any


TEXT = st.text(st.characters(codec=None), max_size=5)  # with lone surrogates, as os.fsdecode gives them
LEAVES = st.one_of(
    TEXT, st.binary(max_size=5), st.integers(), st.integers(-2, 2), st.floats(), st.booleans(), st.none()
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Point, inner, inner),
        st.dictionaries(TEXT, inner, max_size=2),
    ),
    max_leaves=5,
)
EDGES = st.sampled_from([-(2**63), 2**63 - 1, 2**63])
LISTS = st.one_of(
    *(st.lists(kind, max_size=20) for kind in (TEXT, st.binary(max_size=5), EDGES, st.floats(), st.booleans())),
    st.lists(LEAVES, max_size=20),
    st.lists(VALUES, max_size=20),
)


@given(LISTS, st.data(), st.integers(1, 7))
def test_it_has_the_list_s_values_types_and_slices(values: list[Any], data: st.DataObject, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists, "_CHUNK", chunk)
        shared = SharedList(iter(values))
    for one in (shared, pickle.loads(pickle.dumps(shared)), copy.copy(shared), copy.deepcopy(shared)):
        assert repr(list(one)) == repr(values)
    cut = data.draw(st.slices(len(values)))

    assert repr(shared[cut]) == repr(values[cut])
    assert len(shared) == len(values)
    for place in range(-len(values) - 1, len(values) + 1):
        for index in (place, np.int16(place)):
            assert outcome(shared, index) == outcome(values, index)


def outcome(values: Any, index: Any) -> str:
    try:
        return repr(values[index])
    except IndexError as error:
        return str(error).removeprefix("SharedList").removeprefix("list")


@given(LISTS, LISTS)
def test_it_equals_a_list_with_equal_elements(values: list[Any], others: list[Any]) -> None:
    values, others = ([one for one in some if one == one] for some in (values, others))  # noqa: PLR0124 - no NaN
    shared = SharedList(values)

    assert (shared == others, others == shared, shared == SharedList(others)) == (values == others,) * 3
    assert shared != tuple(values)
    for value in (*values[:3], *others[:3]):
        assert (value in shared, shared.count(value)) == (value in values, values.count(value))


@given(LISTS, LISTS, st.integers(-1, 2))
def test_it_calculates_and_compares_as_a_list(values: list[Any], others: list[Any], times: int) -> None:
    shared: Any = SharedList(values)
    for calculate in (operator.add, operator.lt, operator.le, operator.gt, operator.ge):
        expected = attempt(calculate, values, others)
        for left, right in ((shared, others), (shared, SharedList(others)), (values, SharedList(others))):
            assert attempt(calculate, left, right) == expected
    assert repr([shared * times, times * shared, shared.copy(), [*reversed(shared)]]) == repr(
        [values * times, times * values, values, values[::-1]]
    )
    assert [shared.index(value) for value in values if value == value] == [  # noqa: PLR0124 - no NaN
        values.index(value)
        for value in values
        if value == value  # noqa: PLR0124
    ]
    with pytest.raises(TypeError):
        shared + tuple(others)


def attempt(calculate: Callable[..., Any], *values: Any) -> str:
    try:
        return repr(calculate(*values))
    except TypeError as error:  # such as None < 3
        return type(error).__name__


@pytest.mark.parametrize(
    "change",
    [
        lambda it: it.append(1),
        lambda it: it.sort(key=abs),
        lambda it: operator.setitem(it, 0, 1),
        lambda it: operator.delitem(it, 0),
        lambda it: operator.iadd(it, [1]),
        lambda it: operator.imul(it, 2),
    ],
)
def test_a_change_is_refused_with_advice(change: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=r"can't be changed.*list\(shared\)"):
        change(SharedList([1, 2]))


class Held:
    def __init__(self, number: int, what: Any) -> None:
        self.number, self.what = number, what


@pytest.mark.parametrize("hold", [lambda _, x: x, lambda i, x: (i, x), lambda i, x: {"n": i, "x": x, "y": x}, Held])
@pytest.mark.parametrize("what", ["text" * 5000, {"numbers": list(range(5000))}, np.zeros(2500)])
def test_what_many_elements_hold_is_kept_once(hold: Callable[[int, Any], Any], what: Any) -> None:
    values = [hold(number, what) for number in range(200)]
    shared: Any = SharedList(values)

    assert shared.nbytes < 3 * len(pickle.dumps(what)) + 200 * 200
    restored: Any = pickle.loads(pickle.dumps(shared))
    assert pickle.dumps(restored[7]) == pickle.dumps(pickle.loads(pickle.dumps(values[7])))
    if isinstance(shared[0], dict) and "x" in shared[0]:
        first, again = shared[0], shared[0]
        assert first["x"] is first["y"]
        assert first["x"] is not again["x"]


class Local:
    def __init__(self, value: int) -> None:
        self.value = value


Local.__module__ = "__main__"  # as if the script defined it: nobody can import it


def test_elements_that_hold_nothing_in_common_take_no_memory_to_look_at() -> None:
    elements = [(f"{number:0200d}", number) for number in range(50_000)]
    tracemalloc.start()
    try:
        shared = SharedList(elements)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.4 * shared.nbytes


def test_it_takes_what_the_script_defines() -> None:
    made: Callable[[], int] = lambda: 3  # noqa: E731
    shared: SharedList[Any] = SharedList([Local(1), made, Local, {"x": Local(2)}, PurePosixPath("a/b"), np.arange(3)])

    assert (type(shared[0]), shared[0].value, shared[1](), shared[2]) == (Local, 1, 3, Local)
    assert (type(shared[3]["x"]), shared[4]) == (Local, PurePosixPath("a/b"))


def test_an_element_is_the_caller_s_own() -> None:
    shared: SharedList[Any] = SharedList([{"boxes": []}, np.zeros(1000)])
    for number, change in ((0, lambda it: it["boxes"].append(1)), (1, lambda it: it.fill(7))):
        change(shared[number])
    assert shared[0] == {"boxes": []}
    assert not shared[1].any()
    kept = [shared[1], SharedList(["text"])[0], *SharedList(["of", "none"]), *SharedList([b"bytes"])[:]]
    del shared
    gc.collect()
    assert (kept[0].sum(), kept[1:]) == (0, ["text", "of", "none", b"bytes"])
    for call in (lambda: operator.setitem(SharedList([1]), 0, 2), lambda: hash(SharedList([1]))):  # type: ignore[call-overload]
        with pytest.raises(TypeError):
            call()


def test_an_element_that_can_not_be_shared_is_named(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        values = ["text"] * 5000 + [("a", {"file": file})]
        with pytest.raises(EncodeError, match=r"objects\[5000\]\[1\]\['file'\] is a _io.TextIOWrapper"):
            SharedList(values)


def test_it_takes_the_bytes_of_its_elements_until_it_is_deleted() -> None:
    before = set(os.listdir("/proc/self/fd"))
    shared = SharedList(f"{number:060}" for number in range(10_000))
    pickled = pickle.dumps(shared)

    assert shared.nbytes == 68 * 10_000 + 8
    assert repr(shared) == "<SharedList of 10,000 str, 664.1 KiB>"
    assert len(pickled) < 500
    del shared
    assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(SharedMemoryLost, match=r"can't be opened|no longer has"):
        pickle.loads(pickled)


class Slotted:
    __slots__ = ("paths",)

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return self.paths[index]


class Parts(Slotted):
    def __init__(self, *parts: Any, **lists: Any) -> None:
        super().__init__([])
        self.parts, self.itself = parts, self
        vars(self).update(lists)


def test_the_long_lists_of_a_dataset_and_of_those_in_it_are_shared() -> None:
    paths, labels = [str(number) for number in range(LONG)], list(range(LONG))
    arrays, short, cache = [np.zeros(2)] * LONG, ["text"] * (LONG - 1), dict.fromkeys(labels)
    inner, other = Slotted(paths), Parts(samples=paths, imgs=paths, labels=labels)
    rest = {"arrays": arrays, "short": short, "cache": cache, "pair": (paths, labels)}
    dataset = Parts(inner, inner, by_name={"other": other}, **rest)

    assert share_lists(share_lists(dataset)) is dataset
    assert (type(inner.paths), type(other.labels)) == (SharedList, SharedList)  # type: ignore[attr-defined]
    assert inner.paths is other.samples is other.imgs == paths  # type: ignore[attr-defined, comparison-overlap]
    assert type(share_lists(paths)) is SharedList
    assert vars(dataset)["arrays"] is arrays
    assert vars(dataset)["short"] is short
    assert vars(dataset)["cache"] is cache
    assert vars(dataset)["pair"][0] is paths
    with open(os.devnull) as file, pytest.raises(EncodeError, match=r"^dataset\.files\[0\] is a _io.TextIOWrapper"):
        share_lists(Parts(files=[file] * LONG))
