from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pytest

from swift_loader.transport.definitions import Definitions, travels_by_value


class Importable:
    class Inner:
        def method(self) -> None: ...


def importable() -> None: ...


@functools.wraps(importable)
def renamed() -> None: ...


def local_class() -> type:
    class Local:
        pass

    return Local


def of_main() -> type:
    return type("OfMain", (), {"__module__": "__main__"})


@pytest.mark.parametrize(
    "thing",
    [int, Importable, Importable.Inner, Importable.Inner.method, importable, json.dumps, np.ndarray, type(None)],
    ids=str,
)
def test_what_can_be_imported_travels_by_name(thing: object) -> None:
    assert not travels_by_value(thing)


@pytest.mark.parametrize(
    "thing", [lambda: 3, local_class(), of_main(), renamed], ids=["lambda", "local", "main", "renamed"]
)
def test_what_cannot_be_imported_travels_by_value(thing: object) -> None:
    assert travels_by_value(thing)


@pytest.mark.parametrize("thing", [3, "text", len, Importable(), functools.partial(importable)], ids=str)
def test_only_classes_and_functions_are_definitions(thing: object) -> None:
    assert not travels_by_value(thing)


def test_numbers_follow_the_order_of_adding() -> None:
    first, second = local_class(), local_class()
    definitions = Definitions([first])
    assert definitions.add(second) == 1
    assert definitions.add(first) == 0
    assert (definitions.number_of(first), definitions.number_of(second)) == (0, 1)
    assert definitions.number_of(Importable) is None
    assert definitions[1] is second
    assert len(definitions) == 2


def test_no_definitions_are_no_bytes() -> None:
    assert Definitions().dumps() == b""
    assert len(Definitions.loads(b"")) == 0


def test_the_copies_have_the_same_numbers_and_share_what_was_shared() -> None:
    class Base:
        counter = 3

    class Derived(Base):
        def __init__(self, x: int) -> None:
            super().__init__()
            self.x = x

    def make() -> Derived:
        return Derived(Base.counter)

    ours = Definitions([make])
    theirs = Definitions.loads(ours.dumps())
    assert len(theirs) == len(ours)
    numbers = [ours.number_of(thing) for thing in (make, Base, Derived)]
    copies: list[Any] = [theirs[number] for number in numbers if number is not None]
    assert len(copies) == 3
    made = copies[0]()
    assert type(made) is copies[2]
    assert type(made).__mro__[1] is copies[1]
    assert made.x == 3


def test_a_function_that_is_made_anew_each_time_it_is_sent_does_not_go_on_for_ever() -> None:
    class Anew:
        num_sent = 0

        def __reduce__(self) -> Any:
            Anew.num_sent += 1
            if Anew.num_sent > 20:
                pytest.fail("it is sent again and again")
            return (lambda: 3), ()

    thing = Anew()

    def refers() -> object:
        return thing

    assert len(Definitions([refers]).dumps()) > 0
