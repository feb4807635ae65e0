"""Notices that a dataset draws from the global random generators.

Worker threads share them, so no thread can seed them for its sample. A change of their states shows that something
drew. It was a worker if the loop's thread was blocked meanwhile; else it may have been the loop. So the first batch
isn't built before the loop's thread waits for it. It waits for the first batch when the loader starts, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from swift_loader.executors.thread.inbox import ThreadInbox
from swift_loader.scheduler.messages import Event
from swift_loader.worker.seeding import snapshot_generators

FIRST_WAIT_S = 0.1
"""How long the first batch waits for the loop's thread to block. A loop that comes later loses so much prefetching."""

_NAMES = ("random", "numpy.random", "torch's default generator")
"""In the order of a snapshot."""


class DrawWatch:
    """Warns once. All worker threads of a loader use it."""

    def __init__(self, inbox: ThreadInbox[Event], note: Callable[[str], None]) -> None:
        """Begin to watch. Call it on the loop's thread. `inbox` knows whether that thread blocks.

        `note` gets the warning, on any thread.
        """
        self._inbox = inbox
        self._note = note
        self._once = threading.Lock()
        """Held from the warning on."""
        self._has_waited = False
        """Whether a thread has waited for the loop. Others may wait at the same time."""
        snapshot_generators()  # the first call in a process draws, and puts the states back

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Warn if something is drawn in the `with` block."""
        if not self._has_waited:
            self._inbox.await_first_block(FIRST_WAIT_S)
            self._has_waited = True
        num_moves = self._inbox.num_moves
        if num_moves % 2 == 0 or self._once.locked():
            yield
            return
        before = snapshot_generators()
        yield
        after = snapshot_generators()
        # A torch that was imported meanwhile is only in `after`.
        changed = [name for name, old, new in zip(_NAMES, before, after, strict=False) if old != new]
        if changed and self._inbox.num_moves == num_moves and self._once.acquire(blocking=False):
            self._note(_warning(changed))

    def __repr__(self) -> str:
        return f"<DrawWatch{' that has warned' if self._once.locked() else ''}>"


def _warning(names: list[str]) -> str:
    return (
        f"the dataset draws from {' and '.join(names)}. Worker threads share these generators, so they aren't seeded, "
        f"and what a sample draws differs from run to run. Draw from swift_loader.sample_rng(), or give "
        f"worker_type='process'. rng=None turns this warning off"
    )
