"""The processes of an engine: templates, which hold the dataset, and the workers made from them.

One template is forked into all workers; with the start method "spawn", or where the dataset's modules leave threads
behind, each worker has been a template of its own. Belongs to the thread that starts the engine, and afterwards to the
one that closes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from swift_loader.engine.ladder import stop_processes
from swift_loader.engine.settings import ProcessSettings, StartMethod
from swift_loader.engine.template import TemplateProcess
from swift_loader.engine.worker import BatchReader, WorkerHandle
from swift_loader.transport.channel import Channel
from swift_loader.transport.definitions import Definitions
from swift_loader.transport.messages import Built
from swift_loader.transport.payload import Environment, write_payload
from swift_loader.worker.setup import WorkerSetup

__all__ = ["WorkerPool"]

SPARE_SEGMENTS = 8
"""Per worker, beside one for each batch that may be in flight: those the loop has, and those on their way back."""


class WorkerPool:
    """Starts the processes, and stops them."""

    def __init__(self, setup: WorkerSetup, settings: ProcessSettings) -> None:
        self.setup = setup
        """What the processes are told when they start."""
        self.settings = settings
        self._owner_pid = os.getpid()
        self._templates: list[TemplateProcess] = []
        self._built: Built | None = None
        """What the first template said of the dataset."""
        self.workers: list[WorkerHandle] = []
        self.definitions = Definitions()
        """What travels by value, as the processes number it."""

    def start_template(self) -> int:
        """Start the first template, unless that was done, and return the dataset's length once it is built.

        Raises:
            WorkerDied: It ended.
            Exception: What building the dataset raised.
        """
        if self._built is None:
            template, self.definitions = self._add_template(Environment.of_this_process())
            self._built = template.wait_built(self.definitions)
        return self._built.num_samples

    @property
    def reason_for_own_datasets(self) -> str:
        """Why each worker builds a dataset of its own; empty if it doesn't."""
        return "" if self._built is None else self._built.reason

    @property
    def is_ours(self) -> bool:
        """Whether this process started it; a fork of the trainer has only a copy."""
        return os.getpid() == self._owner_pid

    def start_workers(self) -> None:
        """Start all workers; returns when their processes exist, before they are ready.

        Raises:
            WorkerDied: A template ended.
            Exception: What building a dataset raised.
        """
        reader = BatchReader(self.definitions, self.settings.batch_decoder)
        if not self._forks:
            self._start_more_templates(self.settings.num_workers - 1)
        for index in range(self.settings.num_workers):
            ours, theirs = Channel.pair()
            start = self._templates[0].fork if self._forks else self._templates[index].become_worker
            try:
                process = start(index, theirs)
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            keep = self.settings.limits.max_in_flight + SPARE_SEGMENTS
            self.workers.append(WorkerHandle(index, ours, process, reader, keep))

    def watch_template(self, on_death: Callable[[BaseException], None]) -> None:
        """Have `on_death` called, on a thread of its own, when the template goes that the workers depend on."""
        if self._forks:
            self._templates[0].watch(on_death)

    def stop(self) -> None:
        """End all processes, by the stop ladder. Any thread; descriptors stay open for those who wait on them."""
        for worker in self.workers:
            worker.channel.shutdown()
        stop_processes(worker.process.pidfd for worker in self.workers)
        for template in self._templates:
            template.hang_up()
        stop_processes(template.pidfd for template in self._templates)

    def close_templates(self) -> None:
        """Give back what belongs to the templates; they must have ended."""
        for template in self._templates:
            template.close()

    def close_workers(self) -> None:
        """Give back what belongs to the workers; they must have ended, and nobody listen to them any more."""
        for worker in self.workers:
            worker.close()

    def close(self) -> None:
        """End all processes and give everything back, if nobody has begun to listen to them. Idempotent."""
        if self.is_ours:
            self.stop()
            self.close_templates()
            self.close_workers()

    @property
    def _forks(self) -> bool:
        """Whether workers are forks of one template."""
        forkable = self._built is not None and self._built.forkable
        return forkable and self.settings.start_method is StartMethod.TEMPLATE

    def _start_more_templates(self, count: int) -> None:
        """Start all interpreters before waiting for the first of them."""
        environment = Environment.of_this_process()
        for _ in range(count):
            self._add_template(environment)
        for template in self._templates[1:]:
            template.wait_built(self.definitions)

    def _add_template(self, environment: Environment) -> tuple[TemplateProcess, Definitions]:
        layout, descriptor, definitions = write_payload(self.setup, environment)
        try:
            template = TemplateProcess()
            self._templates.append(template)
            template.send_setup(layout, descriptor)
        finally:
            os.close(descriptor)
        return template, definitions

    def __repr__(self) -> str:
        return f"<WorkerPool {len(self._templates)} templates, {len(self.workers)} workers>"
