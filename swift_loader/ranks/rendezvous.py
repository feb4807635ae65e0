"""Exchanges a few facts among the ranks before they start, through the key-value store of torch.distributed.

Each rank writes its facts and adds one to a counter. The last rank to arrive writes the key that wakes all. A rank that
stops waiting (Ctrl-C or its time-out) says so and writes that key, too, so that nobody waits for a rank that is gone.

    rank 0: set facts, add 1 ─► wait(wake) ────────────────┐
    rank 1: set facts, add 1 ─► wait(wake) ──────────────┐ │
    rank 2:              set facts, add 1, set(wake) ────┴─┴─► each gets the facts of all

Assumes that the store is new with each start of the ranks, as torch's own process groups do. torchrun keeps it over a
restart unless told otherwise (https://github.com/pytorch/pytorch/issues/135712). If then one rank has counted more
exchanges than another, it waits for one that never comes, and ends with an error that names the remedy.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from swift_loader.errors import warn
from swift_loader.runtime import LoaderThread

Facts = dict[str, int | str | bool]
"""What a rank reports about itself, as plain JSON types."""

ONLY_SOME = "For a loader that only some ranks use, give nb_consumer=1"

_KEPT_STORE = (
    ". If torchrun has restarted the ranks, the store may still hold what the earlier ranks left. Start torchrun with "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
)

_PREFIX = "swift_loader"

_PATIENCE_S = 30.0
"""After this time the user gets a warning that names the missing ranks."""

_SLICE_S = 1.0
"""Torch before 2.8 can't clone a store, and a wait blocks the store for the whole process. So the wait pauses this
often, to let a wake-up through. torch logs each pause."""

_GRACE_S = 5.0
"""torch logs a wait that times out. So the store's wait gets this much longer than ours, and we end it first."""


class Rendezvous:
    """One exchange of facts. All ranks must have the same number of them, in the same order."""

    def __init__(self, store: Any, process: int, processes: Sequence[int], facts: Facts, name: str = "") -> None:
        """Publish the facts of this rank. Doesn't block.

        `store`: of torch.distributed. `process`: this rank, there. `processes`: the ranks that exchange facts. `name`:
        of the exchanges among these ranks. Those of other ranks need another one.
        """
        prefix = f"{_PREFIX}/{name}" if name else _PREFIX
        self._store, self._process, self._processes = store, process, processes
        self._prefix = f"{prefix}/{store.add(f'{prefix}/process {process}', 1)}"
        store.set(self._key(process), json.dumps(facts))
        if store.add(self._key("arrived"), 1) == len(processes):
            store.set(self._key("wake"), "")

    def gather(self) -> list[Facts]:
        """Return the facts of all ranks, in the order of `processes`.

        Blocks until all have joined, at most for the store's time-out (that of `init_process_group`). Raises
        `RuntimeError` if a rank didn't come, or one stopped waiting.
        """
        self._wait()
        if self._store.check([self._key("left")]):
            process = int(self._store.get(self._key("left")))
            raise RuntimeError(
                f"rank {process} stopped waiting before all ranks had started their loaders: see its own error. "
                f"{ONLY_SOME}"
            )
        return [json.loads(self._store.get(self._key(process))) for process in self._processes]

    def _wait(self) -> None:
        """Block until this rank is woken. After a while, warn the user of the missing ranks and the possible reason."""
        if self._store.check([self._key("wake")]):
            return
        limit_s = self._store.timeout.total_seconds()
        patience_s = min(_PATIENCE_S, limit_s / 2)
        hint = f"all ranks must start theirs, in the same order. {ONLY_SOME}"
        with self._watch(limit_s) as woken:
            if wait([woken], patience_s).done:
                return
            warn(f"{self._problem()}: {hint}. It keeps waiting, up to {limit_s:g} s in all")
            if not wait([woken], limit_s - patience_s).done:
                is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # nothing says whether it was
                raise RuntimeError(f"{self._problem()} within {limit_s:g} s: {hint}{_KEPT_STORE if is_kept else ''}")

    @contextmanager
    def _watch(self, limit_s: float) -> Iterator[Future[None]]:
        """Yield a future that is done once this rank is woken. If the block ends by an exception, wake all ranks.

        Ctrl-C can't interrupt the store's own wait. So that runs in a thread, on its own connection.
        """
        woken: Future[None] = Future()
        stop = threading.Event()
        thread = LoaderThread(self._block, "rendezvous", woken, stop, limit_s + _GRACE_S)
        thread.start()
        try:
            yield woken
            woken.result()  # an error of the store must also wake the other ranks
        except BaseException:
            stop.set()
            with suppress(RuntimeError):  # the store may be gone: what ended the wait says more
                self._store.set(self._key("left"), str(self._process))
                self._store.set(self._key("wake"), "")
            raise
        finally:
            thread.join(_GRACE_S)

    def _block(self, woken: Future[None], stop: threading.Event, limit_s: float) -> None:
        """Wait for the key that wakes all, and pass the result or the error to `woken`. Runs in a thread."""
        try:
            connection, slice_s = self._store, _SLICE_S
            with suppress(AttributeError, RuntimeError):  # torch before 2.8, or a store written in Python
                connection, slice_s = self._store.clone(), limit_s
            while not self._is_woken(connection, slice_s) and not stop.is_set():
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
        missing = [process for process in self._processes if not self._store.check([self._key(process)])]
        return f"this rank has started its loader, but rank {', '.join(map(str, missing))} hasn't"

    def _key(self, name: str | int) -> str:
        """Return a key of this exchange; a rank's number is that of its facts."""
        return f"{self._prefix}/{name}"
