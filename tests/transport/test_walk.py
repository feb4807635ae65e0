from __future__ import annotations

from typing import Any

import pytest

from swift_loader.transport.walk import find_unencodable, type_name


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
