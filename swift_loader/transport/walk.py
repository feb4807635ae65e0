"""Walks through a batch, and finds the part that can't be encoded. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

__all__ = ["find_unencodable", "parts", "type_name"]


_CODE = (type, FunctionType, MethodType, ModuleType)


def type_name(thing: object) -> str:
    """Return the qualified name of an object's type."""
    kind = type(thing)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def find_unencodable(
    whole: object, error: Exception, attempt: Callable[[object], None]
) -> tuple[str, object, Exception]:
    """Return the innermost part of `whole` for which `attempt` raises: its path, the part itself, and the error."""
    path, culprit, seen = "", whole, {id(whole)}
    descended = True
    while descended:
        descended = False
        for step, part in parts(culprit):
            if id(part) in seen:  # a cycle, such as a child that refers to its parent
                continue
            seen.add(id(part))
            try:
                attempt(part)
            except Exception as part_error:
                path, culprit, error, descended = path + step, part, part_error, True
                break
    return path, culprit, error


def parts(thing: Any) -> Iterator[tuple[str, object]]:
    """Yield (step, part) for each part of a container; a step is text such as `['x']`. Yield nothing for a leaf."""
    if isinstance(thing, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in thing.items())
    elif isinstance(thing, tuple) and hasattr(thing, "_fields"):
        yield from ((f".{name}", part) for name, part in zip(thing._fields, thing, strict=True))
    elif isinstance(thing, (list, tuple)):
        yield from ((f"[{position}]", part) for position, part in enumerate(thing))
    elif isinstance(thing, (set, frozenset)):
        yield from (("{...}", part) for part in thing)
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        yield from ((f".{field.name}", getattr(thing, field.name)) for field in dataclasses.fields(thing))
    elif not isinstance(thing, _CODE) and hasattr(thing, "__dict__"):
        yield from ((f".{name}", part) for name, part in vars(thing).items())
