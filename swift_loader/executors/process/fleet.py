"""The workers of one loader that are made from templates, as those who start, use and stop them see them."""

from __future__ import annotations

from collections import deque
from functools import partial

from swift_loader.errors import LoaderClosed
from swift_loader.executors.fleet import EXIT_LIMIT_S, TEMPLATE_STAGES_S, Fleet, or_killed, stop_processes
from swift_loader.executors.handle import Handle
from swift_loader.executors.process.inbox import EpollInbox
from swift_loader.executors.process.memory import WorkerMemory
from swift_loader.executors.process.reader import MessageReader
from swift_loader.executors.process.starter import Starter
from swift_loader.executors.process.template import WorkerProcess
from swift_loader.executors.wording import Explainer
from swift_loader.options import DeliveryOptions
from swift_loader.scheduler.messages import Death, Ended, Event
from swift_loader.threads import Answer
from swift_loader.transport.segments import Segment
from swift_loader.worker.process import refuse_start
from swift_loader.worker.spec import WorkerSpec


class TemplateFleet(Fleet):
    """Its starter's thread starts all processes. It lives as long as they do: the kernel kills them when it ends."""

    def __init__(self, spec: WorkerSpec, options: DeliveryOptions, explainer: Explainer) -> None:
        super().__init__(spec, options, explainer)
        self.starter = Starter(self)
        self.lock = self.starter.lock
        self._building: Answer[float] | None = None

    @property
    def is_open(self) -> bool:
        """Whether processes may start."""
        return self.starter.is_open

    @property
    def notice(self) -> str:
        """Why each worker builds its own dataset; empty if it doesn't."""
        first = self.starter.first
        return "" if first is None or not first.reason else f"each worker builds its own dataset: {first.reason}"

    def start_first(self) -> None:
        """Start the first template, unless that was done; see `Fleet`."""
        if self._building is None:
            self.check_open()
            refuse_start()
            self.starter.prepare()
            self._building = self.starter.call(self.starter.build_first)

    def wait_built(self, *, warns: bool = False) -> tuple[int, float]:
        """Do the same, and wait until the first template has built the dataset; see `Fleet`."""
        self.start_first()
        assert self._building is not None
        if not self._building.wait(self.options.stall_warning_s if warns else None):
            self.warn_of_build()
        build_s = self._building.result()
        assert self.starter.first is not None
        return self.starter.first.report.num_samples, build_s

    def ask_for_stacks(self) -> str:
        """Return the Python stacks of the template that builds the dataset. Blocks for half a second at most."""
        templates = self.starter.templates
        return templates[-1].ask_for_stacks() if templates else ""

    def is_current(self) -> bool:
        """Return whether another start would build the same. The dataset or the environment may have changed."""
        return self.starter.is_current()

    def run(self) -> None:
        """Start the first workers; see `Fleet`."""
        self.starter.call(self.starter.start_first).result()
        self.starter.start_others()

    def start_worker(self, worker_id: int) -> None:
        """Start another worker. Returns at once."""
        self.starter.start_worker(worker_id)

    def make_inbox(self, reader: MessageReader, posted: deque[Event | Handle]) -> EpollInbox:
        """Return an inbox that listens to no worker yet."""
        return EpollInbox(reader, posted)

    def processes(self) -> list[Handle]:
        """Return the workers, by id; without those that are just being replaced.

        Waits until all were started, if they are still being started.
        """
        num_before = -1
        while len(self.workers) < self.options.num_workers and len(self.workers) != num_before:
            num_before = len(self.workers)
            try:
                self.starter.call(lambda: None).result()  # runs after the start of another worker
            except LoaderClosed:
                break
        return super().processes()

    # Acting -----------------------------------------------------------------------------------------------------------

    def reap(self, worker: Handle) -> None:
        """Find out how a worker ended. Returns at once; an event tells."""
        self.starter.submit(partial(self._reap, worker))

    def _reap(self, worker: Handle) -> None:
        """Wait for its exit code, and collect stacks and stderr. On the starter's thread."""
        self.forget(worker)  # again: if it ended as it was added, an inbox may have got it after the first time
        process: WorkerProcess = worker.process
        with_template = self.starter.wait_exit_code(process, EXIT_LIMIT_S)
        traces, stderr = process.diagnostics.last_traces(), process.diagnostics.last_lines()
        self.post(Ended(worker.serial, Death(process.exit_code, worker.is_at_work, with_template, traces, stderr)))

    def dismiss(self, worker: Handle) -> None:
        """Have a worker end that has nothing left to do."""
        worker.channel.shutdown()

    def release(self, worker: Handle) -> list[Segment]:
        """Close a worker that was reaped. Returns at once; see `Fleet`."""
        process = worker.process
        if not process.has_ended:  # it was told to end, and has had `EXIT_LIMIT_S`
            process.kill()
        given_up = super().release(worker)  # before its template, which may be the same process, is closed
        self.starter.submit(partial(self.starter.forget, process, worker.serial))
        return given_up

    def replace_template(self) -> None:
        """Replace the template whose end was posted last. Returns at once."""
        self.starter.replace_template()

    # Stopping ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop all processes, within 4.4 s. Descriptors stay open, as other threads may wait on them. Idempotent."""
        starter = self.starter
        with self.lock:
            starter.stop()
            workers, templates = self.workers.values(), starter.templates
        processes = [worker.process for worker in workers]
        try:
            with or_killed([*processes, *templates]):
                for worker in workers:
                    self.dismiss(worker)
                for template in templates:
                    template.request_exit()  # it ends when its workers have ended
                stop_processes(processes)
                stop_processes(templates, TEMPLATE_STAGES_S)
        finally:
            starter.end()

    def close_processes(self) -> list[Segment]:
        """Close all handles. No thread may listen to them any more. Idempotent; see `Fleet`."""
        mode = self.spec.options.torch
        if mode is not None and mode.pool is not None:
            for worker in self.workers.values():
                if worker.process.has_ended:
                    assert isinstance(worker.memory, WorkerMemory)
                    mode.pool.add(worker.memory.take_free())
        given_up = super().close_processes()
        self.starter.close()
        return given_up
