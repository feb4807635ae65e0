"""One loader's seats in a pool: it has one on each process, and each is a worker of the loader.

    SeatSupervisor ──asks──► ProcessPool.place ──► Place ──SEAT──► process
                   ◄──events── inboxes of the loader ◄──────────── seat's channel

It takes the place of a `Supervisor`. So scheduler, executor and inboxes are those of any loader. The death of a process
is the death of each seat on it: the first loader that asks for another seat gets the process replaced, and the others
get seats on the new process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial

from swift_loader.errors import LoaderClosed
from swift_loader.executors.handle import Handle
from swift_loader.executors.pool.leaving import await_leaving
from swift_loader.executors.pool.place import SeatProcess
from swift_loader.executors.pool.pool import ProcessPool
from swift_loader.executors.pool.template import PoolDataset
from swift_loader.executors.process.dataset_check import DatasetCheck
from swift_loader.executors.process.event_loop_thread import Stopped
from swift_loader.executors.process.inbox import Inboxes
from swift_loader.executors.process.memory import WorkerMemory
from swift_loader.executors.process.workers import FIRST_TORCH_WORKERS, SPARE_SEGMENTS
from swift_loader.executors.wording import LOADER_WORDING
from swift_loader.options import DeliveryOptions
from swift_loader.scheduler.events import Death, Ended, ExecutorFailed
from swift_loader.scheduler.queues import Limits
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.channel import Channel
from swift_loader.transport.descriptors import new_pipe
from swift_loader.transport.pool_messages import Seat
from swift_loader.transport.reports import BuildReport
from swift_loader.transport.segments import Segment
from swift_loader.transport.template_messages import Built
from swift_loader.worker.import_guard import refuse_nesting
from swift_loader.worker.spec import WorkerSpec

__all__ = ["SeatHandle", "SeatSupervisor"]

EXIT_LIMIT_S = 0.5
"""How much later than the end of its pipe a process's exit status may arrive."""

SeatHandle = Handle[Channel, SeatProcess]


class SeatDataset:
    """What the seats serve: the dataset as the loader's executor sees it. See `DatasetSource`."""

    def __init__(self, dataset: PoolDataset) -> None:
        self.of_pool = dataset
        self.datasets = DatasetCheck()

    @property
    def definitions(self) -> Definitions:
        """The definitions that travel by value."""
        return self.of_pool.definitions

    description = ""
    """See `DatasetSource`."""

    @property
    def first(self) -> Built:
        """Whether the dataset is shared by the workers, or why not."""
        reason = self.of_pool.reason
        return Built(BuildReport(0, 0), forkable=not reason, reason=reason)

    def ask_for_stacks(self) -> str:
        """Return nothing: the template serves other loaders, too."""
        return ""


class SeatSupervisor:
    """Gets seats for one loader, learns how their processes ended, and gives the seats back."""

    def __init__(self, pool: ProcessPool, spec: WorkerSpec, options: DeliveryOptions, dataset: PoolDataset) -> None:
        """Ask for nothing yet.

        Args:
            pool: Where to get seats.
            spec: What the workers build.
            options: How batches are delivered.
            dataset: The dataset of `spec`, as the pool's processes get it; owned by this object.
        """
        self.spec = spec
        self.options = options
        self.wording = LOADER_WORDING
        self.owner = pool.owner
        self.templates = SeatDataset(dataset)
        self._pool = pool
        self._lock = threading.RLock()
        """The pool's thread holds it while it uses handles and inboxes; `stop` and `replace`, while they take some."""
        self._is_open = True
        self._began_s = time.monotonic()
        self._starting: Future[None] | None = None
        self._inboxes: Inboxes | None = None
        self.all: Mapping[int, SeatHandle] = {}
        """By serial number, which is the seat's number. Replaced as a whole, so that any thread may read it."""
        pool.on_failure.add(self)

    @property
    def workers(self) -> SeatSupervisor:
        """The seats. They are here."""
        return self

    # Starting ---------------------------------------------------------------------------------------------------------

    def start_first(self) -> None:
        """Start the pool's template, unless it runs. Returns at once.

        Raises:
            RuntimeError: This process is itself a template that imports the user's module.
        """
        if self._starting is None:
            refuse_nesting()
            self._starting = self._pool.thread.call(self._pool.start)

    def wait_built(
        self,
        on_wait: Callable[[], None] | None = None,  # noqa: ARG002 - `SeatDataset.ask_for_stacks` says why
        patience_s: float | None = None,  # noqa: ARG002
    ) -> tuple[int, float]:
        """Do the same, and wait until the template has the datasets that it shares.

        Returns:
            0, because a DataLoader doesn't ask for the dataset's length, and how long it took, in seconds.

        Raises:
            WorkerDied: The template died.
        """
        self.start_first()
        assert self._starting is not None
        self._starting.result()
        return 0, time.monotonic() - self._began_s

    def start_workers(self, inboxes: Inboxes) -> None:
        """Get the first seats. Returns when they were asked for. What happens to them is posted as an event.

        Raises:
            WorkerDied: The template died.
        """

        def start() -> None:
            self._inboxes = inboxes
            for worker_id in range(min(FIRST_TORCH_WORKERS, self.options.num_workers)):
                self._take_seat(worker_id)

        self._pool.thread.call(start).result()

    def start_others(self) -> None:
        """Get the other seats. Returns at once. Any thread."""
        for worker_id in range(FIRST_TORCH_WORKERS, self.options.num_workers):
            self._submit(partial(self._take_seat, worker_id))

    def processes(self) -> list[SeatProcess]:
        """Return the processes of the loader's workers, by id; without those that are just being replaced."""
        with suppress(LoaderClosed):
            self._pool.thread.call(lambda: None).result()  # runs after the seats that were asked for
        return [one.process for one in sorted(self.all.values(), key=lambda one: one.worker_id)]

    def is_current(self) -> bool:
        """Return false: nothing tells whether the dataset has changed."""
        return False

    # Replacing; the thread that holds the dispatch lock ---------------------------------------------------------------

    def reap(self, worker: SeatHandle) -> None:
        """Find out how a seat's process ended. Returns at once; an event tells."""
        self._submit(partial(self._reap, worker))

    def replace(self, worker: SeatHandle) -> list[Segment]:
        """Close a seat that was reaped, and get another one with its id. Returns at once.

        Returns:
            The worker's memory, see `Handle.close`.
        """
        given_up = self.release(worker)
        self.start_worker(worker.worker_id)
        return given_up

    def release(self, worker: SeatHandle) -> list[Segment]:
        """Close a seat that was reaped.

        Returns:
            The worker's memory, see `Handle.close`.
        """
        with self._lock:
            if not self._is_open:
                return []
            self.all = {serial: other for serial, other in self.all.items() if other is not worker}
        return worker.close()

    def start_worker(self, worker_id: int) -> None:
        """Get a seat. Returns at once."""
        if self._is_open:
            self._submit(partial(self._take_seat, worker_id))

    def resize(self, num_workers: int, limits: Limits) -> None:  # noqa: ARG002
        """Raise: there is one seat on each of the pool's processes."""
        raise RuntimeError(
            f"the loader's workers are the {self.options.num_workers} processes of its WorkerPool, so there can't be "
            f"{num_workers}. Make a WorkerPool of so many, or leave workers= out"
        )

    def replace_template(self) -> None:
        """Do nothing: the pool replaces its template itself."""

    # The pool's thread ------------------------------------------------------------------------------------------------

    def _submit(self, function: Callable[[], None]) -> None:
        """Have a function called on the pool's thread. The loop gets its error."""

        def run() -> None:
            try:
                function()
            except Stopped:
                raise
            except Exception as error:
                self.fail(error)

        self._pool.thread.submit(run)

    def fail(self, error: BaseException) -> None:
        """Let the loop have an error instead of batches that aren't ready."""
        with self._lock:
            if self._is_open and self._inboxes is not None:
                self._inboxes.posted.post(ExecutorFailed(error))

    def _take_seat(self, worker_id: int) -> None:
        """Have the process with this id serve the loader."""
        place = self._pool.place(worker_id)
        with self._lock:
            if not self._is_open:
                return
            number, dataset = next(self._pool.seat_numbers), self.templates.of_pool
            request = Seat(number, dataset.key, dataset.layout, self.spec.plan)
            with ExitStack() as sent, ExitStack() as kept:
                ours, theirs = Channel.pair()
                kept.callback(ours.close)
                sent.callback(theirs.close)
                held, their_held = new_pipe()
                sent.callback(os.close, their_held)
                process = SeatProcess(place, number, held)
                kept.callback(process.close)
                place.add_seat(request, theirs, dataset.descriptor, their_held)
                kept.pop_all()
            keep = self.options.limits.max_of_worker(self.options.num_workers) + SPARE_SEGMENTS
            worker = SeatHandle(worker_id, number, ours, process, WorkerMemory(keep))
            self.all = {**self.all, number: worker}
            worker.tell_identity(self.options.num_workers)
            assert self._inboxes is not None
            self._inboxes.watch(worker)

    def _reap(self, worker: SeatHandle) -> None:
        process = worker.process.place.process
        self._pool.thread.run_until(
            lambda: process.exit_code is not None or process.template.is_gone or not self._is_open, EXIT_LIMIT_S
        )
        with self._lock:
            if self._is_open and self._inboxes is not None:
                self._inboxes.forget(worker)  # again: if it ended as it was added, an inbox may have got it later
                self._inboxes.posted.post(Ended(worker.serial, worker.worker_id, _death_of(worker)))

    # Stopping ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Leave the seats. Descriptors stay open, because other threads may wait on them. Idempotent.

        A process that is at a task of this loader gets some time to finish it, and is killed then.
        """
        with self._lock:
            self._is_open, was_open = False, self._is_open
            workers = list(self.all.values())
        if was_open:
            for worker in workers:
                worker.channel.shutdown()
            await_leaving(worker.process for worker in workers)

    def close_processes(self) -> list[Segment]:
        """Close all handles. No thread may listen to the seats any more. Idempotent.

        Returns:
            The workers' memory, see `Handle.close`.
        """
        workers, self.all = self.all, {}
        given_up = [segment for worker in workers.values() for segment in worker.close()]
        self._pool.drop(self.templates.of_pool)
        return given_up

    def close(self) -> None:
        """Leave the seats, and close all handles. Idempotent."""
        if self.owner.is_here():
            self.stop()
            self.close_processes()

    def __repr__(self) -> str:
        return f"<SeatSupervisor{'' if self._is_open else ', closed'}, {len(self.all)} seats>"


def _death_of(worker: SeatHandle) -> Death:
    """Return what is known about the end of a seat's process. For other seats than the one to blame, it is as if the
    template had ended: their workers are replaced, and nothing is counted.
    """
    place = worker.process.place
    process = place.process
    exit_code, is_at_work = process.exit_code, worker.is_at_work and worker.process.is_served
    if exit_code is None and process.template.is_gone:
        exit_code, is_at_work = -signal.SIGKILL, False  # the kernel's, because the template has ended
    return Death(
        exit_code,
        is_at_work,
        with_template=not place.is_to_blame(worker.process.number),
        traces=place.traces(),
        stderr=process.diagnostics.last_lines(),
    )
