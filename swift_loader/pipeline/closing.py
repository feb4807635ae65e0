"""Closes the parts of a run together: each may wait for what hangs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swift_loader.errors import NoProcessesLeft
from swift_loader.threads import LoaderThread


def close_together(closes: Sequence[Callable[[], None]], left_s: Callable[[], float]) -> None:
    """Call all of these at the same time, each but the last in a thread of its own.

    Each returns by itself after a while. `left_s` returns for how many more seconds threads are waited for. One that
    needs longer is left alone. Raises the first error, once all were called.
    """
    errors: list[BaseException] = []
    threads: list[LoaderThread] = []

    def run(close: Callable[[], None]) -> None:
        try:
            close()
        except BaseException as error:
            errors.append(error)

    for close in closes[:-1]:
        thread = LoaderThread(run, "close", close)
        try:
            thread.start()
            threads.append(thread)
        except NoProcessesLeft:  # the interpreter may be ending
            run(close)
    for close in closes[-1:]:
        run(close)
    for thread in threads:
        thread.join(left_s())
    if errors:
        raise errors[0]
