"""Where ranks exchange a few facts before they start: the key-value store of torch.distributed.

A store, not a collective: it needs no device and no stream, can't get entangled with the user's own collectives, and
ends with an error if a rank never comes.

Each rank writes its facts and counts itself in. The last one to come writes the key that wakes all. So does a rank that
stops waiting (Ctrl-C or its time-out), after it has said so: nobody waits for a rank that has gone.

    rank 0: set facts, add 1 ─► wait(wake) ────────────────┐
    rank 1: set facts, add 1 ─► wait(wake) ──────────────┐ │
    rank 2:              set facts, add 1, set(wake) ────┴─┴─► each gets the facts of all
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, TimeoutError  # noqa: A004 - the builtin one from Python 3.11 on
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

__all__ = ["ONLY_SOME", "Facts", "Meeting"]

Facts = dict[str, int | str | bool]
"""What a rank says about itself, as plain JSON types."""

ONLY_SOME = "For a loader that only some ranks use, give nb_consumer=1"

_PREFIX = "swift_loader"

_PATIENCE_S = 30.0
"""After so long the user is told for whom a rank waits."""

_SLICE_S = 1.0
"""Torch before 2.8 can't clone a store, and a wait blocks the store for the whole process. So it pauses this often to
let a wake-up through; that torch logs each pause."""

_GRACE_S = 5.0
"""A wait in the store that times out logs it. So it lasts longer than the rank's own, which wakes it when it ends."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """One exchange of facts. All ranks must hold as many, in the same order."""

    store: Any
    number: int
    process: int
    """This rank, in torch.distributed."""
    world_size: int

    @classmethod
    def join(cls, store: Any, process: int, world_size: int, facts: Facts) -> Meeting:
        """Tell all ranks the facts of this one. Doesn't block."""
        meeting = cls(store, int(store.add(f"{_PREFIX}/process {process}", 1)), process, world_size)
        store.set(meeting._facts_key(process), json.dumps(facts))
        if store.add(meeting._key("arrived"), 1) == world_size:
            store.set(meeting._key("wake"), "")
        return meeting

    def gather(self) -> list[Facts]:
        """Return the facts of all ranks, in the order of torch.distributed.

        Blocks until all have joined, at most for the store's time-out (that of `init_process_group`).

        Raises:
            RuntimeError: A rank didn't come, or one stopped waiting.
        """
        self._wait()
        if self.store.check([self._key("left")]):
            process = int(self.store.get(self._key("left")))
            raise RuntimeError(
                f"rank {process} stopped waiting before all ranks had started their loaders: see its own error. "
                f"{ONLY_SOME}"
            )
        return [json.loads(self.store.get(self._facts_key(process))) for process in range(self.world_size)]

    def _wait(self) -> None:
        """Block until this rank is woken; after a while tell the user for whom it waits, and what may be wrong."""
        if self.store.check([self._key("wake")]):
            return
        limit_s = self.store.timeout.total_seconds()
        patience_s = min(_PATIENCE_S, limit_s / 2)
        hint = f"all ranks must start theirs, in the same order. {ONLY_SOME}"
        with self._watch(limit_s) as woken:
            if _is_done(woken, patience_s):
                return
            warnings.warn(f"{self._problem()}: {hint}. Waiting on, for {limit_s:g} s in all", stacklevel=7)
            if not _is_done(woken, limit_s - patience_s):
                raise RuntimeError(f"{self._problem()} within {limit_s:g} s: {hint}")

    @contextmanager
    def _watch(self, limit_s: float) -> Iterator[Future[None]]:
        """Give what is done once this rank is woken. Whoever leaves before wakes all ranks.

        The store's own wait can't be interrupted by Ctrl-C. So it blocks in a thread, on a connection of its own.
        """
        woken: Future[None] = Future()
        stop = threading.Event()
        thread = threading.Thread(target=self._block, args=(woken, stop, limit_s + _GRACE_S), daemon=True)
        thread.start()
        try:
            yield woken
        except BaseException:
            stop.set()
            with suppress(RuntimeError):  # the store may be gone: what ended the wait says more
                self.store.set(self._key("left"), str(self.process))
                self.store.set(self._key("wake"), "")
            raise
        finally:
            thread.join(_GRACE_S)
        woken.result()

    def _block(self, woken: Future[None], stop: threading.Event, limit_s: float) -> None:
        """Wait for the key that wakes all; what ends it goes to `woken`. Runs in a thread."""
        try:
            can_clone = hasattr(self.store, "clone")
            connection = self.store.clone() if can_clone else self.store
            while not self._is_woken(connection, limit_s if can_clone else _SLICE_S) and not stop.is_set():
                pass  # a slice is over
        except BaseException as error:
            woken.set_exception(error)
        else:
            woken.set_result(None)

    def _is_woken(self, connection: Any, slice_s: float) -> bool:
        try:
            connection.wait([self._key("wake")], timedelta(seconds=slice_s))
        except RuntimeError:
            if not connection.check([self._key("wake")]):  # raises what is wrong, unless it was only the time-out
                return False
        return True

    def _problem(self) -> str:
        missing = [process for process in range(self.world_size) if not self.store.check([self._facts_key(process)])]
        return f"this rank has started its loader, but rank {', '.join(map(str, missing))} hasn't"

    def _facts_key(self, process: int) -> str:
        return self._key(str(process))

    def _key(self, name: str) -> str:
        return f"{_PREFIX}/{self.number}/{name}"


def _is_done(future: Future[None], timeout_s: float) -> bool:
    """Block for at most so long; Ctrl-C interrupts it."""
    try:
        future.exception(timeout_s)
    except TimeoutError:
        return False
    return True
