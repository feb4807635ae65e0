"""The workers of one loader: made from templates, one for each worker id.

Everything here runs on the supervisor's thread, unless a method says otherwise.
"""

from __future__ import annotations

from functools import partial

from swift_loader.executors.handle import Handle
from swift_loader.executors.process.diagnostics import Diagnostics
from swift_loader.executors.process.event_loop_thread import EventLoopThread
from swift_loader.executors.process.inbox import ProcessInboxes
from swift_loader.executors.process.memory import WorkerMemory
from swift_loader.executors.process.template import TemplateProcess, WorkerProcess
from swift_loader.executors.process.templates import Templates
from swift_loader.options import DeliveryOptions
from swift_loader.transport.channel import Channel

# The trainer's handle on one worker that a template forked, or that was a template.

WorkerHandle = Handle[Channel, WorkerProcess]


SPARE_SEGMENTS = 8
"""Per worker, in addition to one per batch in flight: those that the loop holds, and those on their way back."""

FIRST_WORKERS = 4
"""Started before the loader starts. The others are started while these build batches. A fork takes some ms."""

FIRST_TORCH_WORKERS = 0
"""The same for torch's workers: their loader waits for none of them when it starts."""

FORK_LIMIT_S = 30.0
"""A template that doesn't fork within this time hangs and is replaced."""


class Workers:
    """Starts the workers, and knows those that exist."""

    def __init__(self, options: DeliveryOptions, thread: EventLoopThread, templates: Templates) -> None:
        self.options = options
        """`Supervisor.resize` replaces these and the limits."""
        self.limits = options.limits
        self._thread = thread
        self._templates = templates
        self._inboxes: ProcessInboxes | None = None
        """Who listens to new workers. None while the first ones start."""
        self._num_first = FIRST_WORKERS if templates.spec.options.torch is None else FIRST_TORCH_WORKERS
        self._num_started = 0
        self.all: dict[int, WorkerHandle] = {}
        """By serial number. Replaced as a whole, under the thread's lock, so that any thread may read it."""

    @property
    def max_segments(self) -> int:
        """How many segments a worker needs if the user keeps no batch."""
        return self.limits.max_of_worker(self.options.num_workers) + SPARE_SEGMENTS

    def start_first(self, inboxes: ProcessInboxes) -> None:
        """Start the first workers. Each inbox listens to its part."""
        for worker_id in range(min(self._num_first, self.options.num_workers)):
            self.start(worker_id)
        for worker in self.all.values():
            inboxes.watch(worker)
        self._inboxes = inboxes

    def start_others(self) -> None:
        """Have the workers started that `start_first` left. Returns at once. Any thread."""
        self._thread.submit(partial(self.start_late, self._num_first, self.options.num_workers))

    def start_late(self, worker_id: int, stop: int) -> None:
        """Start the workers with the ids from this one up to `stop`, unless nothing is started any more."""
        if worker_id < stop and self._thread.is_open:
            self.start(worker_id)
            self._thread.submit(partial(self.start_late, worker_id + 1, stop))  # after deaths that came meanwhile

    def start(self, worker_id: int) -> None:
        """Start a worker with this id."""
        if self._templates.are_forkable:
            self._fork(self._templates.living(), worker_id)
        else:
            self._templates.add_ahead(worker_id, self.options.num_workers)
            self._turn_into_worker(self._templates.build_another(), worker_id)

    def remove(self, worker: WorkerHandle) -> None:
        """Forget a worker. Any thread that holds the thread's lock."""
        self.all = {serial: other for serial, other in self.all.items() if other is not worker}

    def _fork(self, template: TemplateProcess, worker_id: int) -> None:
        while True:
            serial, diagnostics = self._num_started, Diagnostics()
            try:
                ours, theirs = Channel.pair()
            except BaseException:
                diagnostics.close()
                raise
            try:
                template.request_fork(serial, theirs, diagnostics)
                theirs.close()
                diagnostics.close_their_ends()
                process = self._wait_forked(template, serial)
            except BaseException:
                theirs.close()
                ours.close()
                diagnostics.close()
                raise
            if process is not None:
                self._add_worker(worker_id, ours, process)
                return
            ours.close()
            diagnostics.close()
            template = self._templates.living()

    def _wait_forked(self, template: TemplateProcess, serial: int) -> WorkerProcess | None:
        """Return the worker; None if the template is gone, or was killed because it hung."""
        if not self._thread.run_until(lambda: template.has_forked(serial) or template.is_gone, FORK_LIMIT_S):
            template.reason = f"it didn't start a worker within {FORK_LIMIT_S:g} s, and was killed"
            template.kill()
            self._thread.run_until(lambda: template.is_gone)
        return template.claim(serial)

    def _turn_into_worker(self, template: TemplateProcess, worker_id: int) -> None:
        """Turn a template into a worker."""
        ours, theirs = Channel.pair()
        try:
            process = template.become_worker(self._num_started, theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._add_worker(worker_id, ours, process)

    def _add_worker(self, worker_id: int, ours: Channel, process: WorkerProcess) -> None:
        worker = WorkerHandle(worker_id, self._num_started, ours, process, WorkerMemory(self.max_segments))
        self._num_started += 1
        if (mode := self._templates.spec.options.torch) is not None:
            worker.tell_identity(self.options.num_workers, mode.kept.pop(worker_id, []))
        if process.pid != process.template.pid:
            self._templates.watch(process.diagnostics)
        with self._thread.lock:
            self.all = {**self.all, worker.serial: worker}
        if self._inboxes is not None:
            self._inboxes.watch(worker)
