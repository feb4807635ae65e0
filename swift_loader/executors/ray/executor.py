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
from swift_loader.executors.base import ToDo
from swift_loader.executors.executor import WorkerExecutor
from swift_loader.executors.process.dataset_check import DatasetCheck
from swift_loader.executors.ray.calls import told_by_ray
from swift_loader.executors.ray.inbox import Posted
from swift_loader.executors.ray.supervisor import RaySupervisor
from swift_loader.metrics.metrics import Metrics
from swift_loader.options import DeliveryOptions
from swift_loader.sampling.plan import Plan
from swift_loader.scheduler.messages import Stall, Start, TemplateLost, WorkerLost
from swift_loader.transport.segments import Segment


class ActorExecutor(WorkerExecutor):
    """The actors of one loader."""

    fleet: RaySupervisor

    def __init__(
        self,
        supervisor: RaySupervisor,
        metrics: Metrics,
        log: Callable[[str], None],
        on_segment: Callable[[Segment], None] | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        """Make an executor that isn't started. It owns the supervisor, whose actors may be running already.

        `on_segment`: see `ArrivalStore`. `note` gets warnings for the user, on any thread; None: the log gets them.
        """
        super().__init__(supervisor, metrics, log, on_segment)
        self._note = note or log
        self._placement: threading.Timer | None = None
        """Warns of actors without a place."""

    def start(self) -> None:
        """Start the actors. Blocks until the first one has built the dataset.

        Raises as `connect` does, `LoaderClosed` if another thread has closed the executor, `WorkerDied` if all actors
        were lost, `WorkerStalled` if none has found room, or what building the dataset raised.
        """
        supervisor, options = self.fleet, self.fleet.options
        built = supervisor.wait_first_build(
            lambda: warn(f"building the dataset has taken {options.stall_warning_s:g} s so far"),
            options.stall_warning_s,
            warn,
        )
        self._begin(Plan.of(built.num_samples, supervisor.spec.plan), built.build_s)
        supervisor.run()

    def connect(self) -> None:
        """Connect this process to the cluster, and have Ray start the actors. Returns at once.

        Raises as `ActorLaunch.prepare` does.
        """
        self.fleet.start_first()

    @property
    def options(self) -> DeliveryOptions:
        """How batches are delivered, with the number of workers now."""
        return self.fleet.options

    def start_beside(
        self, plan: Plan, build_s: float, datasets: DatasetCheck, post: Callable[[Sequence[Posted]], None]
    ) -> None:
        """Use the actors beside other workers, which have built the dataset. Waits for no actor. Call `connect` first.

        `plan`: what all workers start with. `build_s`: seconds that the first build of the dataset took. `datasets`
        compares what all workers have built. `post` gets each actor that may have an answer, and events. Any thread
        calls it.
        """
        supervisor = self.fleet
        supervisor.datasets, supervisor.tell = datasets, post
        self._begin(plan, build_s)
        supervisor.tell(list(supervisor.workers.values()))

    def _begin(self, plan: Plan, build_s: float) -> None:
        """Make what exists once the dataset is built."""
        supervisor = self.fleet
        supervisor.make_store(self._on_segment)
        # The store tells of its segments: what the reader sees are no segments.
        supervisor.listen(self.begin(plan, build_s, None))
        self._watch_placement()

    def _watch_placement(self) -> None:
        """Warn if an actor has no place after a while. Any thread."""
        limit_s = self.fleet.wanted.placement_warning
        if limit_s is None or self._placement is not None or not self.fleet.num_unplaced():
            return
        self._placement = threading.Timer(limit_s, self._look_at_placement, [limit_s])
        self._placement.name, self._placement.daemon = "swift_loader-placement", True
        self._placement.start()

    def _look_at_placement(self, limit_s: float) -> None:
        self._placement = None
        supervisor = self.fleet
        try:
            num_late = supervisor.num_unplaced(limit_s)
            if num_late:
                rest = ". The others go on without them" if num_late < len(supervisor.workers) else ""
                self._note(f"{supervisor.unplaced_text()}{rest}")
            else:
                self._watch_placement()
        except Exception as error:  # the connection has ended meanwhile
            self._log(f"asking Ray for the cluster's resources failed: {error}")

    # Acting -----------------------------------------------------------------------------------------------------------

    def use_plan(self, generation: int, plan: Plan, resume: Mapping[int, bytes] | None = None) -> None:
        """Use this plan from this generation on. Batches of earlier generations aren't needed any more."""
        super().use_plan(generation, plan, resume)
        self.fleet.use_generation(generation)

    def carry_out(self, action: ToDo) -> list[Segment]:
        """Do what the scheduler decided. The caller holds the dispatch lock."""
        given_up = super().carry_out(action)
        if isinstance(action, Start):
            self._watch_placement()
        return given_up

    def error_of(self, cause: WorkerLost | Stall | BaseException) -> BaseException:
        """Return the error for the loop."""
        error = super().error_of(cause)
        return type(error)(f"{error}{self._told_by_ray(cause)}") if isinstance(cause, WorkerLost) else error

    def notice_of(self, about: WorkerLost | Stall | TemplateLost) -> str:
        """Return the warning for the user."""
        notice, supervisor = super().notice_of(about), self.fleet
        if isinstance(about, WorkerLost):
            return f"{notice}{self._told_by_ray(about)}"
        if isinstance(about, Stall) and about.worker is None and supervisor.num_unplaced():
            return f"{notice}. {supervisor.unplaced_text()}"
        return notice

    def _told_by_ray(self, case: WorkerLost) -> str:
        worker = self.fleet.workers[case.worker]
        loss = worker.process.loss
        return "" if loss is None or worker.hang is not None else told_by_ray(loss)

    # Stopping ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all actors, and wake whoever waits in an inbox. Any thread. Idempotent."""
        placement = self._placement
        if placement is not None:
            placement.cancel()
        super().stop()

    def close(self) -> list[Any]:
        """Drop all references, once the actors have ended. No thread may wait in an inbox. Idempotent."""
        placement, self._placement = self._placement, None
        if placement is not None and placement is not threading.current_thread():
            placement.cancel()  # again: the last one may have started it after `stop`
            placement.join()
        return super().close()
