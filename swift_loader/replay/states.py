"""Finds a loader's state in a file: a checkpoint of torch, or JSON."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["read_state"]

_FIELDS = frozenset({"version", "seed", "epoch", "position", "shuffle"})
"""What only a state of a `SwiftLoader` has."""


def read_state(path: str | Path, key: str | None = None, *, unpickle: bool = False) -> Mapping[str, Any]:
    """Return the state of a `SwiftLoader` that a file holds.

    Args:
        path: A file of `torch.save`, or JSON if its name ends in `.json`.
        key: Where in the file the state is: keys and positions, joined by dots, such as `loader` or `loaders.0`.
            Default: wherever there is one, if there is only one.
        unpickle: Whether the file may hold any objects. Loading them can run code that the file brings, so do this
            only with files that you trust.

    Raises:
        OSError: The file can't be read.
        ValueError: It isn't such a file, or has no state there, or several.
    """
    content = _loaded(Path(path), unpickle=unpickle)
    if key is not None:
        found = list(_at(content, key))
        if not found:
            raise ValueError(f"{path} has no {key!r}; it has {_keys(content)}")
        if not isinstance(found[0], Mapping):
            raise ValueError(f"{key!r} in {path} is a {type(found[0]).__name__}; a state is a dict")
        return found[0]
    states = dict(_states(content, ""))
    if len(states) == 1:
        return next(iter(states.values()))
    if states:
        raise ValueError(f"{path} has several states, at {', '.join(map(repr, states))}; give the key of one of them")
    raise ValueError(
        f"{path} has no state of a SwiftLoader; it has {_keys(content)}. A state is what loader.state_dict() returned"
    )


def _loaded(path: Path, *, unpickle: bool) -> Any:
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    import torch

    is_zip = zipfile.is_zipfile(path)  # then the weights can be mapped, and aren't read
    try:
        return torch.load(path, map_location="cpu", weights_only=not unpickle, mmap=is_zip)
    except pickle.UnpicklingError as error:
        if unpickle or not is_zip:
            raise ValueError(f"{path} isn't a file of torch.save: {_first_line(error)}") from error
        raise ValueError(
            f"{path} holds objects that aren't tensors or plain types. Loading them can run code that the file brings. "
            f"If you trust it, give unpickle=True (--unpickle)"
        ) from error
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"{path} isn't a file of torch.save: {_first_line(error)}") from error


def _items(node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, Mapping):
        return [(str(key), value) for key, value in node.items()]
    return [(str(number), value) for number, value in enumerate(node)] if isinstance(node, (list, tuple)) else []


def _at(node: Any, path: str) -> Iterator[Any]:
    """Yield what is at a path. A key may have dots itself."""
    for key, value in _items(node):
        if path == key:
            yield value
        elif path.startswith(f"{key}."):
            yield from _at(value, path[len(key) + 1 :])


def _states(node: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(node, Mapping) and node.keys() >= _FIELDS:
        yield path, node
        return
    for key, value in _items(node):
        yield from _states(value, f"{path}.{key}" if path else key)


def _keys(content: Any) -> str:
    items = [key for key, _ in _items(content)]
    return f"the keys {', '.join(map(repr, items))}" if items else f"a {type(content).__name__}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
