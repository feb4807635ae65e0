"""What is measured of one loader over all its passes, what is said of it, and the number of workers that follows."""

from __future__ import annotations

import time
from operator import sub
from typing import Any

from swift_loader.metrics.machine import available_cores, available_memory, main_thread_ns, ranks_here
from swift_loader.metrics.metrics import Metrics
from swift_loader.metrics.observations import Observations, Setup
from swift_loader.report.report import Report, Teller
from swift_loader.report.tuning import MAX_WINDOW_BATCHES, Autotuner


class Observer:
    """Measures one loader. It doesn't keep the loader alive, which each call gives.

    Its `_observed()` says what it is now: `DeliveryOptions`, batch size, and whether it moves batches to
    a device. The loop's thread calls `tell` and `tune`; any thread calls the others.
    """

    def __init__(self, option: str, *, enabled: bool = True) -> None:
        """`option` is what the loader calls its number of workers."""
        self.metrics = Metrics(enabled=enabled)
        self.autotuner: Autotuner | None = None
        """Chooses the number of workers. None: the user does. Any thread may end the tuning."""
        self._option = option
        self._teller = Teller(option)
        self._main_thread_ns = main_thread_ns()

    def observations(self, loader: Any) -> Observations:
        """Return what was measured up to now."""
        return self.metrics.observations(self._setup(loader))

    def recent(self, loader: Any, num_batches: int) -> Observations:
        """Return the same of the last batches only. Takes some 50 µs."""
        return self.metrics.recent(self._setup(loader), num_batches)

    def report(self, loader: Any) -> Report:
        """Return what was measured up to now, and what it means. Empty if nothing is measured."""
        autotuner = self.autotuner
        tuning = () if autotuner is None else tuple(autotuner.describe())
        counts = self.metrics.report()
        return Report(self.observations(loader), counts, self._option, tuning) if counts else Report()

    def tell(self, loader: Any) -> str:
        """Say what would help, if the loop waited in the epoch that it has met the end of. Return what was said."""
        is_due = self._teller.is_due(self.metrics.elapsed_s)
        return self._teller.tell(self.observations(loader)) if is_due else ""

    def tune(self, loader: Any) -> int | None:
        """Return a better number of workers. None: there is none, or it isn't time yet. Between two batches."""
        autotuner = self.autotuner
        if autotuner is None or not autotuner.is_due(now_ns := time.perf_counter_ns()):
            return None
        observations = self.recent(loader, MAX_WINDOW_BATCHES)
        if not autotuner.has_measured(observations, now_ns):
            return None
        return autotuner.decide(observations, now_ns, available_memory())

    def _setup(self, loader: Any) -> Setup:
        """Return what the loader and its machine have now."""
        delivery, batch_size, has_device = loader._observed()  # noqa: SLF001
        num_workers = int(delivery.num_workers)
        now_ns = self._main_thread_ns if delivery.uses_processes else main_thread_ns()
        ran_ns, waited_ns = map(sub, now_ns, self._main_thread_ns)
        return Setup(
            num_workers=num_workers,
            max_in_flight=delivery.limits.max_in_flight if num_workers else 1,
            is_in_flight_chosen=delivery.max_in_flight is None,
            in_order=delivery.in_order,
            batch_size=batch_size,
            worker_type=delivery.worker_type.value,
            num_cores=available_cores(),
            world_size_here=ranks_here(),
            has_device=has_device,
            num_remote=0 if delivery.executor is None else max(0, num_workers - delivery.num_local),
            run_delay_ratio=max(0.0, waited_ns / ran_ns) if ran_ns > 0 else 0.0,  # a fork has other counts
        )
