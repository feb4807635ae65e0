"""Builds batches in worker processes on every system: carries out what the scheduler decides, reports what happens.

Which thread does what:

    loop's thread, or a receiver thread    Inbox.wait; carry_out, under the dispatcher's dispatch lock; starts processes
    two threads for each process           send its payload and wait for its end; forward its stderr
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from swift_loader.errors import LoaderClosed, warn
from swift_loader.executors.base import ToDo
from swift_loader.executors.num_receivers import num_receivers
from swift_loader.executors.portable.inbox import Inbox, Inboxes, PortableWorker
from swift_loader.executors.portable.supervisor import PortableSupervisor
from swift_loader.executors.process.deaths import attached
from swift_loader.executors.running import WorkersExecutor
from swift_loader.sampling.plan import Plan
from swift_loader.scheduler.messages import (
    Dismiss,
    Kill,
    Reap,
    Release,
    Send,
    Start,
)
from swift_loader.scheduler.queues import Limits
from swift_loader.transport.segments import Segment

_NOTICE = (
    "each worker is a fresh interpreter that builds its own dataset (start_method='portable'), so starting takes "
    "longer than with the template of Linux"
)


class PortableExecutor(WorkersExecutor[PortableSupervisor, PortableWorker]):
    """The workers of one loader. It owns the supervisor, whose first process may be running already."""

    _inboxes: Inboxes | None = None
    """Made with the running workers."""

    def start(self) -> None:
        """Start the workers. Blocks until the first one has built the dataset.

        Raises `LoaderClosed` if another thread has closed the executor, `WorkerDied` if the first worker died, or what
        building the dataset raised.
        """
        supervisor, options = self._supervisor, self._supervisor.options
        self._log(_NOTICE)
        supervisor.start_others()
        built = supervisor.wait_first_build(self._warn_of_build, options.stall_warning_s)
        plan = Plan.of(built.num_samples, supervisor.spec.plan)
        reader = self._begin_to_run(
            lambda: supervisor.workers,
            plan,
            built.build_s,
            supervisor.definitions,
            supervisor.datasets,
            self._on_segment,
        )
        inboxes = self._inboxes = Inboxes(num_receivers(options), reader)
        with suppress(FileNotFoundError):  # it has ended since then, which is an event
            event = reader.read(supervisor.workers[0], built.message, inboxes.all[0])
            if event is not None:
                inboxes.posted.post(event)
        try:
            supervisor.watch_all(inboxes)
        except LoaderClosed:  # another thread may have closed the executor before it had these
            inboxes.close()
            raise

    def _warn_of_build(self) -> None:
        stacks = attached(traces=self._supervisor.workers[0].ask_for_stacks())
        warn(f"building the dataset has taken {self._supervisor.options.stall_warning_s:g} s so far{stacks}")

    # What it is -------------------------------------------------------------------------------------------------------

    @property
    def listening(self) -> Inboxes:
        """The inboxes, once the dataset is built."""
        assert self._inboxes is not None, "the executor hasn't started"
        return self._inboxes

    @property
    def inboxes(self) -> Sequence[Inbox]:
        """The loop's inbox, then one for each thread that takes over while the loop is busy."""
        return self.listening.all

    # Acting -----------------------------------------------------------------------------------------------------------

    def resize(self, num_workers: int, limits: Limits) -> None:
        """Be ready for so many workers from now on."""
        self._supervisor.resize(num_workers, limits)
        options = self._supervisor.options
        self.running.explainer.options = options
        self.listening.grow(num_receivers(options))

    def carry_out(self, action: ToDo) -> list[Segment]:
        """Do what the scheduler decided. The caller holds the dispatch lock.

        Returns:
            Memory of workers. Unlocking and unmapping it takes a while, so drop it where nobody waits.
        """
        if isinstance(action, Send):
            return self.running.send(action)
        if isinstance(action, Start):
            self._supervisor.start_worker(action.worker_id)
            return []
        worker = self.running.get(getattr(action, "worker", -1))
        if worker is None:
            return []
        if isinstance(action, Kill):
            self.running.note_hang(worker, action.stall)
            worker.process.kill()
        elif isinstance(action, Reap):
            self.listening.forget(worker)
            self._supervisor.reap(worker)
        elif isinstance(action, Dismiss):
            worker.process.request_exit()
        elif isinstance(action, Release):
            return self._supervisor.release(worker)
        return []

    # Stopping ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all processes, and wake whoever waits in the loop's inbox. Any thread. Idempotent."""
        if self._inboxes is not None:
            self._inboxes.all[0].wake()
        self._supervisor.stop()

    def close(self) -> list[Any]:
        """Close all handles. The processes must have ended, and no thread may wait in an inbox. Idempotent."""
        given_up = self._supervisor.close_processes()
        if self._inboxes is not None:
            self._inboxes.close()
        return given_up

    def __repr__(self) -> str:
        return f"<PortableExecutor, {self._supervisor!r}>"
