"""What a loader does before `start()`: it gets the dataset's length, and starts the process that builds the dataset."""

from __future__ import annotations

import weakref
from typing import Any

from swift_loader.executors.local_builder import dataset_of
from swift_loader.executors.processes import Starter, make_starter, warm_up
from swift_loader.interrupts import run_finalizer
from swift_loader.options import Options
from swift_loader.sampling.plan import PlanSettings
from swift_loader.worker.seeding import Rng
from swift_loader.worker.spec import WorkerSpec, length_of


class Preparation:
    """The dataset in this process and the template that builds it in another, each made when something needs it.

    The supervisor belongs to this object until `hand_over`, and is closed with it. Any thread may call `close`.
    """

    def __init__(self, options: Options, dataset: Any = None) -> None:
        self._options = options
        self.dataset: Any = options.workers.dataset if dataset is None else dataset
        """The dataset in this process; None if it isn't built here."""
        self._supervisor: Starter | None = None
        self._close_supervisor: weakref.finalize[Any, Any] | None = None
        delivery = options.delivery
        num_local = delivery.num_workers if delivery.executor is None else delivery.num_local
        if num_local:
            warm_up(options.workers.start_method, options.workers.modules)

    def use_options(self, options: Options) -> None:
        """Prepare a loader with another number of workers, at least 1."""
        self._options = options
        if self._supervisor is not None:
            self._supervisor.resize(options.delivery.num_workers, options.delivery.limits)

    def built_dataset(self) -> Any:
        """Return the dataset in this process. Build it if it isn't built here yet."""
        if self.dataset is None:
            self.dataset = dataset_of(self._options.workers)
        return self.dataset

    def begin(self, plan: PlanSettings) -> None:
        """Begin to build the dataset in a template, unless that was done. Returns at once."""
        if self._supervisor is not None or not self._options.delivery.uses_processes:
            return
        supervisor = self._make_supervisor(plan)
        try:
            supervisor.start_first()
        except BaseException:
            self.close()
            raise

    def num_samples(self, plan: PlanSettings) -> int:
        """Return the dataset's length. Blocks while a template builds the dataset, if it isn't in this process."""
        if self.dataset is not None or not self._options.delivery.uses_processes:
            return length_of(self.built_dataset())
        supervisor = self._supervisor
        if supervisor is None or not supervisor.owner.is_here():
            supervisor = self._make_supervisor(plan)
        try:
            return supervisor.wait_built()[0]
        except BaseException:
            self.close()
            raise

    def supervisor_for(self, plan: PlanSettings) -> Starter | None:
        """Return the supervisor that is there already, if this plan can use it; else a new one. None without workers.

        It belongs to this object until `hand_over`.
        """
        if not self._options.delivery.uses_processes:
            return None
        supervisor = self._supervisor
        if supervisor is not None and supervisor.owner.is_here():
            seeds_by_plan = self._options.workers.rng is Rng.WORKER
            if (supervisor.spec.plan == plan or not seeds_by_plan) and supervisor.is_current():
                return supervisor
        self.close()
        return self._make_supervisor(plan)

    def hand_over(self) -> None:
        """Leave the supervisor to the session, which closes it."""
        self._supervisor = None
        if self._close_supervisor is not None:
            self._close_supervisor.detach()

    def close(self) -> None:
        """Close the supervisor, if there is one. Idempotent."""
        self._supervisor = None
        if self._close_supervisor is not None:
            run_finalizer(self._close_supervisor)

    def _make_supervisor(self, plan: PlanSettings) -> Starter:
        self._supervisor = supervisor = make_starter(WorkerSpec(self._options.workers, plan), self._options.delivery)
        self._close_supervisor = weakref.finalize(self, supervisor.close)
        return supervisor
