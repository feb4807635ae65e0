"""Prevents a loader's process from starting a loader while it imports the dataset's modules, and a start in gevent.

The module that defines a dataset may start a loader when it is imported. In the trainer, the user wants that. The
template imports the same module to get the dataset; there it would start another template, which imports it again.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_importing: ContextVar[bool] = ContextVar("swift_loader_is_importing", default=False)


@contextmanager
def importing() -> Iterator[None]:
    """Make `refuse_start` raise within this context, and show no warning: the trainer shows those of its imports.

    The garbage collector pauses. It would take a tenth of the time of torch's import, and find next to nothing.
    """
    token, shows, thresholds = _is_importing.set(True), warnings.showwarning, gc.get_threshold()
    warnings.showwarning = _show_nothing
    gc.set_threshold(0)
    try:
        yield
    finally:
        _is_importing.reset(token)
        if warnings.showwarning is _show_nothing:  # else a module has set its own
            warnings.showwarning = shows
        if gc.get_threshold()[0] == 0:  # the same
            gc.set_threshold(*thresholds)


def _show_nothing(*_: object, **__: object) -> None:
    """Stand for `warnings.showwarning`."""


def is_importing() -> bool:
    """Return whether this process is a loader's, and is importing the dataset's modules."""
    return _is_importing.get()


def has_greenlets() -> bool:
    """Return whether gevent has put greenlets in the place of threads, or its own wait in the place of the system's."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and any(map(monkey.is_module_patched, ("select", "threading")))


def refuse_start() -> None:
    """Raise `RuntimeError` if this process is a loader's, and is importing the dataset's modules; or in gevent."""
    if has_greenlets():
        raise RuntimeError(
            "gevent has patched this process (gevent.monkey), so the threads that look after worker processes would "
            "hang. Load in a process without the patch, or with 0 workers"
        )
    if _is_importing.get():
        raise RuntimeError(
            "a module starts a loader when it is imported, and this loader's own process imports that module to get "
            "the dataset: that would start processes without end. Start the loader in that module under "
            "if __name__ == '__main__', or in a function"
        )
