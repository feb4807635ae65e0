"""The worker processes of one loader, on Linux."""

from __future__ import annotations

import os
import select
from collections import deque
from contextlib import suppress
from functools import partial

from swift_loader.errors import LoaderClosed, warn
from swift_loader.executors.fleet import TEMPLATE_STAGES_S, Fleet, or_killed, stop_processes
from swift_loader.executors.handle import GONE, Handle
from swift_loader.executors.inbox import WorkerInbox
from swift_loader.executors.process.forks import FORKS
from swift_loader.executors.process.memory import WorkerMemory
from swift_loader.executors.process.reader import MessageReader
from swift_loader.executors.process.server import Process
from swift_loader.executors.process.starter import Starter
from swift_loader.executors.wording import Explainer
from swift_loader.options import DeliveryOptions
from swift_loader.runtime import Answer
from swift_loader.scheduler.messages import Death, Ended, Event
from swift_loader.transport.channel import new_epoll, new_eventfd
from swift_loader.transport.segments import Segment
from swift_loader.worker.process import refuse_start
from swift_loader.worker.spec import StartMethod, WorkerSpec

# Waits in epoll_wait(2) for worker processes, and uses no CPU while nothing happens.

_MAX_POLL_S = 1e6
"""epoll_wait(2) takes less than 2**31 ms. A caller that waits longer calls again."""

_MAX_EVENTS = 64


class EpollInbox(WorkerInbox):
    """The channels and processes to listen to. Used by one thread at a time."""

    def __init__(self, reader: MessageReader, posted: deque[Event | Handle]) -> None:
        super().__init__(reader, posted)
        self._workers: dict[int, Handle] = {}
        """By descriptor: of the channel and of the process."""
        self._epoll = new_epoll()
        self._bell = -1
        FORKS.holders.add(self)
        try:
            self._bell = new_eventfd()
            self._epoll.register(self._bell, select.EPOLLIN)
        except BaseException:
            self.close()
            raise

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns; some may be -1."""
        return [-1 if self._epoll.closed else self._epoll.fileno(), self._bell]

    def watch(self, worker: Handle) -> None:
        """Also listen to this worker. Any thread may call it, even while another one waits."""
        # Watch the process as well as the pipe: a process that the dataset started may hold a copy of the pipe open.
        for descriptor in (worker.channel.fileno(), worker.process.pidfd):
            self._workers[descriptor] = worker
            self._epoll.register(descriptor, select.EPOLLIN)

    def forget(self, worker: Handle) -> None:
        """Stop listening to a worker. Call it before its descriptors are closed. Idempotent and thread-safe."""
        for descriptor in (worker.channel.fileno(), worker.process.pidfd):
            if self._workers.pop(descriptor, None) is not None:
                self._epoll.unregister(descriptor)

    def watch_room(self, worker: Handle) -> None:
        """Send what waits in a worker's outbox as soon as its pipe has room. Any thread."""
        descriptor = worker.channel.fileno()
        if descriptor in self._workers:
            with suppress(OSError, ValueError):  # it was forgotten meanwhile
                self._epoll.modify(descriptor, select.EPOLLIN | select.EPOLLOUT)

    def _send_rest(self, worker: Handle) -> None:
        """Send what waits for a worker's pipe, which has room."""
        with suppress(OSError, ValueError):
            self._epoll.modify(worker.channel.fileno(), select.EPOLLIN)  # first: another thread may add more
        try:
            if worker.channel.flush():
                self.watch_room(worker)
        except OSError as error:
            if error.errno not in GONE:  # its end is an event
                raise

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        """Return what the workers have sent; see `executors.base.Inbox.wait`."""
        if self.remote is not None and (seen := self.remote.look_at_connection()) is not None:
            return [seen]
        limit_s = None if timeout_s is None else min(max(0.0, timeout_s), _MAX_POLL_S)
        events: list[Event] = []
        while True:
            try:
                self.is_waiting = True
                ready = self._epoll.poll(0 if self._is_woken else limit_s, _MAX_EVENTS)
                self.is_waiting = False
            except (OSError, ValueError):
                if self.is_closed:  # a signal handler closed it meanwhile
                    return events
                raise
            is_sent = False
            for descriptor, mask in ready:
                worker = self._workers.get(descriptor)
                if self.is_closed:  # another thread closed it while a batch was decoded
                    return events
                if worker is not None:
                    # The event may be of a worker that is gone, whose descriptor's number is another worker's now.
                    process = worker.process
                    if mask & select.EPOLLOUT:
                        self._send_rest(worker)
                        is_sent = timeout_s is not None  # return: if the kernel has no memory, this may go on for ever
                    self._read(worker, events, all_of_it=descriptor == process.pidfd and process.has_ended)
                elif descriptor == self._bell:
                    os.eventfd_read(descriptor)  # before the events are taken: a later one rings again
                    self._take_posted(events)
            if events or self._is_woken or not ready or is_sent:
                return events
            limit_s = None if timeout_s is None else 0.0

    def ring(self) -> None:
        """End the current `wait`, or the next one. Thread-safe. Does nothing once closed."""
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Close the descriptors of its own. Idempotent."""
        self.is_closed = True
        self._epoll.close()
        if self._bell >= 0:
            bell, self._bell = self._bell, -1  # before it is closed, see `Holder`
            os.close(bell)


# The fleet ------------------------------------------------------------------------------------------------------------


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
        template = self.starter.template
        return "" if template is None else template.ask_for_stacks()

    def is_current(self) -> bool:
        """Return whether another start would build the same. The dataset or the environment may have changed."""
        return self.starter.is_current()

    def run(self) -> None:
        """Start the first workers; see `Fleet`."""
        first = self.starter.first
        if first is not None and first.is_odd and self.spec.options.start_method is StartMethod.TEMPLATE:
            warn(
                f"the workers are fresh interpreters, which take longer to start and more memory than forks, because "
                f"{self.notice}. Open files and start threads in __getitem__. If this is meant, give "
                f"start_method='spawn' (DataLoader: multiprocessing_context='spawn')"
            )
        self.starter.call(self.starter.start_first).result()

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

    def renew(self) -> list[Segment]:
        """Kill all workers, and start others; see `Fleet`."""
        template = self.starter.template
        if template is not None and template.is_gone:
            self.starter.replace_template()  # its end may have got lost
        self.starter.call(self.starter.leave_workers).result()
        return super().renew()

    def reap(self, worker: Handle) -> None:
        """Find out how a worker ended. Returns at once; an event tells."""
        self.starter.submit(partial(self._reap, worker))

    def _reap(self, worker: Handle) -> None:
        """Wait for its exit code, and collect stacks and stderr. On the starter's thread."""
        self.forget(worker)  # again: if it ended as it was added, an inbox may have got it after the first time
        process: Process = worker.process
        with_template = self.starter.learn_end(process)
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
        return super().release(worker)

    def replace_template(self) -> None:
        """Replace the template whose end was posted last. Returns at once."""
        self.starter.replace_template()

    # Stopping ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop all processes, within 4.4 s. Descriptors stay open, as other threads may wait on them. Idempotent."""
        starter = self.starter
        with self.lock:
            starter.stop()
            workers, others = self.workers.values(), starter.without_tasks
        processes = [worker.process for worker in workers]
        try:
            with or_killed([*processes, *others]):
                for worker in workers:
                    self.dismiss(worker)
                for process in others:
                    process.request_exit()  # a template ends when its workers have ended
                stop_processes(processes)
                stop_processes(others, TEMPLATE_STAGES_S)
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
