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


def test_the_innermost_part_is_named() -> None:
    message = find_unencodable([1, {"a": (2, 3j)}], ValueError("outer"), Attempts(1, 2))
    assert message.startswith("batch[1]['a'][1] is a complex")
    assert "TypeError: bad" in message


def test_a_batch_whose_parts_are_all_fine_is_named_itself() -> None:
    message = find_unencodable([1, 2], ValueError("outer"), Attempts(1, 2))
    assert message.startswith("batch is a list")
    assert "ValueError: outer" in message


def test_a_list_that_holds_itself_ends() -> None:
    batch: list[Any] = []
    batch.append(batch)
    assert find_unencodable(batch, ValueError("outer"), Attempts()).startswith("batch")


def test_children_that_know_their_parent_end() -> None:
    root, child = Node(), Node()
    root.children.append(child)
    child.parent = root
    child.children.append(3j)
    message = find_unencodable({"tree": root}, ValueError("outer"), Attempts(None))
    assert message.startswith("batch['tree'].children[0].children[0] is a complex")
