"""Builds batches in worker processes on every system: carries out what the scheduler decides, reports what happens.

Which thread does what:

    loop's thread, or a receiver thread    Inbox.wait; carry_out, under the dispatcher's dispatch lock; starts processes
    two threads for each process           send its payload and wait for its end; forward its stderr
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from swift_loader.errors import LoaderClosed, warn
from swift_loader.executors.inboxes import Inboxes
from swift_loader.executors.portable.inbox import Inbox, PortableWorker, Posted
from swift_loader.executors.portable.supervisor import PortableSupervisor
from swift_loader.executors.process.deaths import attached
from swift_loader.executors.running import LocalExecutor
from swift_loader.sampling.plan import Plan

_NOTICE = (
    "each worker is a fresh interpreter that builds its own dataset (start_method='portable'), so starting takes "
    "longer than with the template of Linux"
)


class PortableExecutor(LocalExecutor[PortableSupervisor, PortableWorker, Inbox, Posted]):
    """The workers of one loader. It owns the supervisor, whose first process may be running already."""

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
        inboxes = self._inboxes = Inboxes(options, Posted(), partial(Inbox, reader))
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
