"""Builds batches in worker processes: carries out what the scheduler decides, and reports what happens.

Which thread does what:

    loop's thread, or a receiver thread    Inbox.wait; carry_out, under the dispatcher's dispatch lock
    supervisor's thread                    starts and reaps processes, forwards their stderr, posts events
"""

from __future__ import annotations

from functools import partial

from swift_loader.errors import LoaderClosed, warn
from swift_loader.executors.handle import AnyHandle
from swift_loader.executors.inboxes import Inboxes
from swift_loader.executors.process.deaths import attached
from swift_loader.executors.process.inbox import Inbox, Posted
from swift_loader.executors.process.supervisor import Supervisor
from swift_loader.executors.running import LocalExecutor
from swift_loader.sampling.plan import Plan


class ProcessExecutor(LocalExecutor[Supervisor, AnyHandle, Inbox, Posted]):
    """The workers of one loader. It owns the supervisor, whose first process may be running already."""

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
        inboxes = self._inboxes = Inboxes(options, Posted(), partial(Inbox, reader))
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
