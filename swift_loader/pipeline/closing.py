"""Closes the parts of a run together: each may wait for what hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from swift_loader.errors import NoProcessesLeft
from swift_loader.threads import LoaderThread


class _Closing:
    """One part that is being closed."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self.error: BaseException | None = None

    def run(self) -> None:
        """Close it. Keeps the error."""
        try:
            self._close()
        except BaseException as error:
            self.error = error


def close_together(closes: Sequence[Callable[[], None]], left_s: Callable[[], float]) -> None:
    """Call all of these at the same time, each but the last in a thread of its own.

    Each returns by itself after a while. `left_s` returns for how many more seconds threads are waited for. One that
    needs longer is left alone. Raises the first error, once all were called.
    """
    closings = [_Closing(close) for close in closes]
    threads = [thread for one in closings[:-1] if (thread := _started(one)) is not None]
    if closings:
        closings[-1].run()
    for thread in threads:
        thread.join(left_s())
    _raise_first(one.error for one in closings)


def _started(closing: _Closing) -> LoaderThread | None:
    """Close a part in a thread; here, if the interpreter is ending and starts none."""
    thread = LoaderThread(closing.run, "close")
    try:
        thread.start()
    except NoProcessesLeft:
        closing.run()
        return None
    return thread


def _raise_first(errors: Iterable[BaseException | None]) -> None:
    for error in errors:
        if error is not None:
            raise error
