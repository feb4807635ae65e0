from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from swift_loader.pipeline.functions import Kind, as_function, kind_of, name_of


def function(item: Any, other: int = 0) -> Any:
    return item


def generator(item: Any) -> Iterator[Any]:
    yield item


async def coroutine(item: Any) -> Any:
    return item


async def async_generator(item: Any) -> AsyncIterator[Any]:
    yield item


class Callable:
    async def __call__(self, item: Any) -> Any:
        return item

    def method(self, item: Any) -> Iterator[Any]:
        yield item


@pytest.mark.parametrize(
    ("given", "kind", "name"),
    [
        (function, Kind.FUNCTION, "function"),
        (generator, Kind.GENERATOR, "generator"),
        (coroutine, Kind.COROUTINE, "coroutine"),
        (async_generator, Kind.ASYNC_GENERATOR, "async_generator"),
        (functools.partial(functools.partial(function, other=1)), Kind.FUNCTION, "function"),
        (Callable(), Kind.COROUTINE, "Callable"),
        (Callable().method, Kind.GENERATOR, "method"),
        (len, Kind.FUNCTION, "len"),
        (int, Kind.FUNCTION, "int"),
    ],
)
def test_the_kind_of_a_function(given: Any, kind: Kind, name: str) -> None:
    assert (kind_of(given), name_of(given)) == (kind, name)


def test_a_dict_or_a_list_looks_items_up() -> None:
    assert as_function({"a": 1})("a") == 1
    assert as_function([5, 6])(1) == 6


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="5 can't be called"):
        as_function(5)
