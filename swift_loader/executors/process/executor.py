"""Builds batches in worker processes: carries out what the scheduler decides, and reports what happens.

Which thread does what:

    loop's thread, or a receiver thread    Inbox.wait; carry_out, under the dispatcher's dispatch lock
    supervisor's thread                    starts and reaps processes, forwards their stderr, posts events
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from swift_loader.errors import LoaderClosed, warn
from swift_loader.executors.base import ToDo
from swift_loader.executors.handle import AnyHandle
from swift_loader.executors.num_receivers import num_receivers
from swift_loader.executors.process.deaths import attached
from swift_loader.executors.process.inbox import Inbox, Inboxes
from swift_loader.executors.process.supervisor import Supervisor
from swift_loader.executors.running import WorkersExecutor
from swift_loader.sampling.plan import Plan
from swift_loader.scheduler.messages import (
    Dismiss,
    Kill,
    Reap,
    Release,
    ReplaceTemplate,
    Send,
    Start,
)
from swift_loader.scheduler.queues import Limits
from swift_loader.transport.segments import Segment


class ProcessExecutor(WorkersExecutor[Supervisor, AnyHandle]):
    """The workers of one loader. It owns the supervisor, whose first process may be running already."""

    _inboxes: Inboxes | None = None
    """Made with the running workers."""

    # Starting ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start template and workers. Blocks until the dataset is built.

        Raises `WorkerDied`, or what building the dataset raised.
        """
        supervisor, options = self._supervisor, self._supervisor.options
        num_samples, build_s = supervisor.wait_built(self._warn_of_template, options.stall_warning_s)
        templates = supervisor.templates
        if templates.first is not None and templates.first.reason:
            self._log(f"each worker builds its own dataset: {templates.first.reason}")
        plan = Plan.of(num_samples, supervisor.spec.plan)
        reader = self._begin_to_run(
            lambda: supervisor.workers.all, plan, build_s, templates.definitions, templates.datasets, self._on_segment
        )
        inboxes = self._inboxes = Inboxes(num_receivers(options), reader)
        try:
            supervisor.start_workers(inboxes)
        except LoaderClosed:  # another thread may have closed the executor before it had these
            inboxes.close()
            raise
        supervisor.workers.start_others()

    def _warn_of_template(self) -> None:
        stacks = self._supervisor.templates.ask_for_stacks()
        what = "importing what the dataset needs" if "<frozen importlib" in stacks else "building the dataset"
        warn(f"{what} has taken {self._supervisor.options.stall_warning_s:g} s so far{attached(traces=stacks)}")

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
        if isinstance(action, ReplaceTemplate):
            self._supervisor.replace_template()
            return []
        worker = self.running.get(action.worker)
        if worker is None:
            return []
        if isinstance(action, Kill):
            self.running.note_hang(worker, action.stall)
            worker.process.send_signal(signal.SIGKILL)
        elif isinstance(action, Reap):
            self.listening.forget(worker)
            self._supervisor.reap(worker)
        elif isinstance(action, Dismiss):
            worker.channel.shutdown()
        elif isinstance(action, Release):
            return self._supervisor.release(worker)
        return []

    # Stopping ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all processes, and wake whoever waits in the loop's inbox. Any thread. Idempotent."""
        if self._inboxes is not None:
            self._inboxes.all[0].wake()
        self._supervisor.stop()

    def close(self) -> list[Segment]:
        """Close all handles. The processes must have ended, and no thread may wait in an inbox. Idempotent."""
        given_up = self._supervisor.close_processes()
        if self._inboxes is not None:
            self._inboxes.close()
        return given_up

    def __repr__(self) -> str:
        return f"<ProcessExecutor, {self._supervisor!r}>"
