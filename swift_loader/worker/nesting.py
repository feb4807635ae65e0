"""Keeps a loader's process from starting a loader while it imports what it was sent.

The module that defines a dataset may start a loader of it when it is imported. In the trainer that is what the user
wants; in the template, which imports the module to come by the dataset, it would start a template that imports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["importing", "refuse_nesting"]

_is_importing: ContextVar[bool] = ContextVar("swift_loader_is_importing", default=False)


@contextmanager
def importing() -> Iterator[None]:
    """Refuse to start loaders within this context."""
    token = _is_importing.set(True)
    try:
        yield
    finally:
        _is_importing.reset(token)


def refuse_nesting() -> None:
    """Raise if this is a loader's process that is importing what it was sent.

    Raises:
        RuntimeError: It is.
    """
    if _is_importing.get():
        raise RuntimeError(
            "a loader is started by a module that this loader's own process imports to come by the dataset, which "
            "would start processes without end; put what that module does when it is run under "
            "if __name__ == '__main__', or into a function"
        )
