from __future__ import annotations

import functools
import json
import types

import numpy as np
import pytest

from swift_loader.transport.by_value import Definitions, NewDefinitions, travels_by_value


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


def test_types_of_c_code_travel_by_name() -> None:
    assert not travels_by_value(types.FunctionType)
    assert not travels_by_value(type({}.keys()))


def test_what_is_sent_within_a_process_is_known_until_it_has_arrived() -> None:
    definitions = NewDefinitions()
    thing = local_class()
    number = definitions.number_of(thing)
    assert definitions[number] is thing
    definitions.clear()
    assert len(definitions) == 0
    assert definitions.number_of(local_class()) == 0
