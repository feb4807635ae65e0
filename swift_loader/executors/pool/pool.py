"""The processes of a pool: one for each worker id, each a fork of the pool's template.

They start with the first loader that needs them. A process that died is replaced when a loader asks for a seat there.
"""

from __future__ import annotations

import contextlib
from itertools import count
from typing import Protocol
from weakref import WeakSet

from swift_loader.executors.pool.place import Place
from swift_loader.executors.pool.template import PoolDataset, PoolTemplate
from swift_loader.executors.process.diagnostics import Diagnostics
from swift_loader.executors.process.event_loop_thread import EventLoopThread, Stopped
from swift_loader.executors.process.template import TemplateProcess
from swift_loader.executors.process.termination import stop_processes
from swift_loader.executors.process.worker_process import WorkerProcess
from swift_loader.process_owner import ProcessOwner
from swift_loader.transport.channel import Channel
from swift_loader.worker.spec import WorkerSpec

__all__ = ["ProcessPool"]

FORK_LIMIT_S = 30.0
"""A template that doesn't fork within this time hangs and is replaced."""


class _Fails(Protocol):
    def fail(self, error: BaseException) -> None:
        """Take note that no seat can be had any more. The pool's thread."""
        ...


class ProcessPool:
    """The processes that several loaders share. Thread-safe, but for what runs on its own thread."""

    def __init__(self, num_workers: int) -> None:
        """Start nothing yet."""
        self.num_workers = num_workers
        self.owner = ProcessOwner()
        self.thread = EventLoopThread(lambda: None, self._note_failure, "swift_loader-pool")
        """Starts all processes, and asks them for seats."""
        self.on_failure: WeakSet[_Fails] = WeakSet()
        """The loaders that must know if the thread fails."""
        self.seat_numbers = count(1)
        self._keys = count(1)
        self._serials = count()
        self._template = PoolTemplate(self.thread)
        self._places: dict[int, Place] = {}
        """By worker id. Replaced as a whole, under the thread's lock, as is `_former`."""
        self._former: tuple[Place, ...] = ()
        """Those that ended, while a loader still has a handle on them."""

    # Any thread -------------------------------------------------------------------------------------------------------

    def add(self, spec: WorkerSpec) -> PoolDataset:
        """Write down the dataset of a loader. The template shares it if it hasn't started yet.

        Raises:
            EncodeError: The dataset or a function can't be sent.
        """
        dataset = PoolDataset.write(next(self._keys), spec)
        self._template.share(dataset)
        return dataset

    def drop(self, dataset: PoolDataset) -> None:
        """Forget a dataset. No seat needs it any more."""

        def drop() -> None:
            self._template.unshare(dataset.key)
            dataset.close()
            self._tidy()

        if not self.thread.submit(drop):
            dataset.close()

    @property
    def has_started(self) -> bool:
        """Whether the template has started, so that workers read later datasets themselves."""
        return self._template.has_started

    @property
    def num_processes(self) -> int:
        """How many worker processes there are now."""
        return len(self._places)

    def close(self) -> None:
        """End all processes, and close all handles. Idempotent, but not for two threads at a time."""
        if not self.owner.is_here() or self.thread.loop.is_closed:
            return
        with self.thread.lock:
            self.thread.stop()
            places = [*self._places.values(), *self._former]
        try:
            for place in places:
                place.request_exit()
            stop_processes(place.process.pidfd for place in places)
            template = self._template.stopping()
            if template is not None:
                stop_processes([template.pidfd])
        finally:
            self.thread.end()
        for place in places:
            place.close()
        for dataset in self._template.datasets:
            dataset.close()
        self._template.close()
        self.thread.loop.close()

    # The pool's thread ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the template, unless it runs. Return when it has the datasets that are known now.

        Raises:
            WorkerDied: It died.
        """
        self._template.living()

    def place(self, worker_id: int) -> Place:
        """Return the process with this id. Fork it if there is none, or if it has ended.

        Raises:
            WorkerDied: The template died several times in a row.
        """
        place = self._places.get(worker_id)
        if place is not None and not place.process.has_ended:
            return place
        forked = self._fork(0 if place is None else place.num_fruitless)
        with self.thread.lock:  # `close` has seen it, or doesn't see it any more
            if not self.thread.is_open:
                forked.request_exit()
                stop_processes([forked.process.pidfd])
                forked.close()
                raise Stopped
            self._former = (*self._former, *([place] if place is not None else []))
            self._places = {**self._places, worker_id: forked}
        self._tidy()
        return forked

    def _tidy(self) -> None:
        """Close the processes that have ended and that no loader needs any more."""
        unneeded = [place for place in self._former if not place.seats]
        if not unneeded:
            return
        with self.thread.lock:
            self.thread.check_open()
            self._former = tuple(place for place in self._former if place not in unneeded)
        for place in unneeded:
            self.thread.loop.unwatch(place.process.diagnostics.fileno())
            place.process.template.forget(place.process.serial)
            place.close()

    def _fork(self, num_fruitless: int) -> Place:
        while True:
            template, serial = self._template.living(), next(self._serials)
            diagnostics = Diagnostics()
            with contextlib.ExitStack() as undo:
                undo.callback(diagnostics.close)
                ours, theirs = Channel.pair()
                undo.callback(ours.close)
                try:
                    template.request_fork(serial, theirs, diagnostics)
                finally:
                    theirs.close()
                diagnostics.close_their_ends()
                process = self._wait_forked(template, serial)
                if process is not None:
                    undo.pop_all()
                    self._template.note_fork()
                    self._template.watch(diagnostics)
                    return Place(process, ours, num_fruitless)

    def _wait_forked(self, template: TemplateProcess, serial: int) -> WorkerProcess | None:
        """Return the process; None if the template is gone, or was killed because it hung."""
        if not self.thread.run_until(lambda: template.has_forked(serial) or template.is_gone, FORK_LIMIT_S):
            template.end(f"it didn't start a worker within {FORK_LIMIT_S:g} s, and was killed")
            self.thread.run_until(lambda: template.is_gone)
        return template.claim(serial)

    def _note_failure(self, error: BaseException) -> None:
        for loader in list(self.on_failure):
            loader.fail(error)

    def __repr__(self) -> str:
        return f"<ProcessPool of {self.num_workers}, {self.num_processes} running, {self._template!r}>"
