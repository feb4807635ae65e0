"""Builds batches in Ray actors: carries out what the scheduler decides, and reports what happens.

Which thread does what:

    loop's thread, or the receiver thread    ActorInbox.wait; carry_out, under the dispatcher's dispatch lock
    a thread of Ray                          says that an actor may have answered
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swift_loader.errors import warn
from swift_loader.executors.base import Inbox, ToDo
from swift_loader.executors.process.dataset_check import DatasetCheck
from swift_loader.executors.ray.calls import told_by_ray
from swift_loader.executors.ray.inbox import ActorInbox, Posted, RayWorker
from swift_loader.executors.ray.supervisor import RaySupervisor
from swift_loader.executors.running import OnSegment, WorkersExecutor
from swift_loader.metrics.metrics import Metrics
from swift_loader.options import DeliveryOptions
from swift_loader.sampling.plan import Plan
from swift_loader.scheduler.messages import (
    Dismiss,
    Kill,
    Look,
    Reap,
    Release,
    Send,
    Stall,
    Start,
    TemplateLost,
    WorkerLost,
)
from swift_loader.scheduler.queues import Limits
from swift_loader.transport.segments import Segment


class ActorExecutor(WorkersExecutor[RaySupervisor, RayWorker]):
    """The actors of one loader."""

    def __init__(
        self,
        supervisor: RaySupervisor,
        metrics: Metrics,
        log: Callable[[str], None],
        on_segment: OnSegment = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        """Make an executor that isn't started. It owns the supervisor, whose actors may be running already.

        `on_segment`: see `ArrivalStore`. `note` gets warnings for the user, on any thread; None: the log gets them.
        """
        super().__init__(supervisor, metrics, log, on_segment)
        self._note = note or log
        self._inboxes: list[ActorInbox] = []
        """Made with the running workers."""
        self._placement: threading.Timer | None = None
        """Warns of actors without a place."""

    def start(self) -> None:
        """Start the actors. Blocks until the first one has built the dataset.

        Raises as `connect` does, `LoaderClosed` if another thread has closed the executor, `WorkerDied` if all actors
        were lost, `WorkerStalled` if none has found room, or what building the dataset raised.
        """
        supervisor, options = self._supervisor, self._supervisor.options
        built = supervisor.wait_first_build(
            lambda: warn(f"building the dataset has taken {options.stall_warning_s:g} s so far"),
            options.stall_warning_s,
            warn,
        )
        self._begin(Plan.of(built.num_samples, supervisor.spec.plan), built.build_s)
        # What has come up to now wasn't taken, the first build first.
        others = (worker for worker in supervisor.workers.values() if worker is not built.worker)
        supervisor.post([built.worker, *others])

    def connect(self) -> None:
        """Connect this process to the cluster, and have Ray start the actors. Returns at once.

        Raises as `ActorLaunch.prepare` does.
        """
        self._supervisor.start_first()

    @property
    def options(self) -> DeliveryOptions:
        """How batches are delivered, with the number of workers now."""
        return self._supervisor.options

    def start_beside(
        self, plan: Plan, build_s: float, datasets: DatasetCheck, post: Callable[[Sequence[Posted]], None]
    ) -> None:
        """Use the actors beside other workers, which have built the dataset. Waits for no actor. Call `connect` first.

        `plan`: what all workers start with. `build_s`: seconds that the first build of the dataset took. `datasets`
        compares what all workers have built. `post` gets each actor that may have an answer, and events. Any thread
        calls it.
        """
        supervisor = self._supervisor
        supervisor.datasets, supervisor.post = datasets, post
        self._begin(plan, build_s)
        supervisor.post(list(supervisor.workers.values()))

    def _begin(self, plan: Plan, build_s: float) -> None:
        """Make what exists once the dataset is built."""
        supervisor = self._supervisor
        supervisor.make_store(self._on_segment)
        # The store tells of its segments: what the reader sees are no segments.
        reader = self._begin_to_run(
            lambda: supervisor.workers, plan, build_s, supervisor.launch.definitions, supervisor.datasets, None
        )
        look, mailbox = supervisor.look_at_connection, supervisor.mailbox
        self._inboxes = [ActorInbox(waiting, reader, look) for waiting in (mailbox.of_loop, mailbox.of_receiver)]
        self._watch_placement()

    def _watch_placement(self) -> None:
        """Warn if an actor has no place after a while. Any thread."""
        limit_s = self._supervisor.wanted.placement_warning
        if limit_s is None or self._placement is not None or not self._supervisor.num_unplaced():
            return
        self._placement = threading.Timer(limit_s, self._look_at_placement, [limit_s])
        self._placement.name, self._placement.daemon = "swift_loader-placement", True
        self._placement.start()

    def _look_at_placement(self, limit_s: float) -> None:
        self._placement = None
        supervisor = self._supervisor
        try:
            num_late = supervisor.num_unplaced(limit_s)
            if num_late:
                rest = ". The others go on without them" if num_late < len(supervisor.workers) else ""
                self._note(f"{supervisor.unplaced_text()}{rest}")
            else:
                self._watch_placement()
        except Exception as error:  # the connection has ended meanwhile
            self._log(f"asking Ray for the cluster's resources failed: {error}")

    # What it is -------------------------------------------------------------------------------------------------------

    @property
    def inboxes(self) -> Sequence[Inbox]:
        """The loop's inbox, then that of the thread that takes over while the loop is busy."""
        return self._inboxes

    # Acting -----------------------------------------------------------------------------------------------------------

    def use_plan(self, generation: int, plan: Plan, resume: Mapping[int, bytes] | None = None) -> None:
        """Use this plan from this generation on. Batches of earlier generations aren't needed any more."""
        super().use_plan(generation, plan, resume)
        self._supervisor.use_generation(generation)

    def resize(self, num_workers: int, limits: Limits) -> None:
        """Be ready for so many actors from now on."""
        self._supervisor.resize(num_workers, limits)
        self.running.explainer.options = self._supervisor.options

    def carry_out(self, action: ToDo) -> list[Segment]:
        """Do what the scheduler decided. The caller holds the dispatch lock.

        Returns:
            Memory of workers. Unlocking and unmapping it takes a while, so drop it where nobody waits.
        """
        if isinstance(action, Send):
            return self.running.send(action)
        if isinstance(action, Start):
            self._supervisor.start_worker(action.worker_id)
            self._watch_placement()
            return []
        worker = self.running.get(getattr(action, "worker", -1))
        if worker is None:
            return []
        if isinstance(action, Kill):
            self.running.note_hang(worker, action.stall)
            worker.channel.drop_results()
            worker.process.kill()
        elif isinstance(action, Look):
            worker.look()
        elif isinstance(action, Reap):
            self._supervisor.reap(worker)
        elif isinstance(action, Dismiss):
            worker.process.kill()
        elif isinstance(action, Release):
            return self._supervisor.release(worker)
        return []

    def error_of(self, cause: WorkerLost | Stall | BaseException) -> BaseException:
        """Return the error for the loop."""
        error = super().error_of(cause)
        return type(error)(f"{error}{self._told_by_ray(cause)}") if isinstance(cause, WorkerLost) else error

    def notice_of(self, about: WorkerLost | Stall | TemplateLost) -> str:
        """Return the warning for the user."""
        notice, supervisor = super().notice_of(about), self._supervisor
        if isinstance(about, WorkerLost):
            return f"{notice}{self._told_by_ray(about)}"
        if isinstance(about, Stall) and about.worker is None and supervisor.num_unplaced():
            return f"{notice}. {supervisor.unplaced_text()}"
        return notice

    def _told_by_ray(self, case: WorkerLost) -> str:
        worker = self._supervisor.workers[case.worker]
        loss = worker.process.loss
        return "" if loss is None or worker.hang is not None else told_by_ray(loss)

    # Stopping ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all actors, and wake whoever waits in an inbox. Any thread. Idempotent."""
        placement = self._placement
        if placement is not None:
            placement.cancel()
        self._supervisor.stop()

    def close(self) -> list[Any]:
        """Drop all references, once the actors have ended. No thread may wait in an inbox. Idempotent."""
        placement, self._placement = self._placement, None
        if placement is not None and placement is not threading.current_thread():
            placement.cancel()  # again: the last one may have started it after `stop`
            placement.join()
        return self._supervisor.close_processes()
