"""What is measured of a DataLoader over all its epochs, and what that leads to."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swift_loader.dataloader.options import delivery_of
from swift_loader.executors.setup import setup_of
from swift_loader.metrics.metrics import Metrics
from swift_loader.metrics.observations import Observations, Setup
from swift_loader.options import AutoWorkers
from swift_loader.report.report import Report
from swift_loader.report.verdict import DATALOADER, Teller
from swift_loader.tuning.autotuner import Autotuner, room_for

if TYPE_CHECKING:
    from swift_loader.dataloader.dataloader import DataLoader


class Observer:
    """Measures one loader. It doesn't keep the loader alive, which each call gives.

    The loop's thread calls `tune` and `end_epoch`; any thread calls the others.
    """

    def __init__(self) -> None:
        self.metrics = Metrics(enabled=True)
        self._teller = Teller(DATALOADER)
        self._first_setup: Setup | None = None
        """What the machine had when it was asked for recent observations for the first time."""
        self._autotuner: Autotuner | None = None
        """Made by the first batch, if the loader chooses the number of its workers."""

    def observations(self, loader: DataLoader[Any]) -> Observations:
        """Return what was measured up to now."""
        return self.metrics.observations(_setup_of(loader))

    def recent(self, loader: DataLoader[Any], num_batches: int) -> Observations:
        """Return the same of the last batches only. Takes some 50 us."""
        self._first_setup = self._first_setup or _setup_of(loader)  # asking the machine for its cores takes longer
        in_flight = delivery_of(loader).in_flight.num_batches if loader.num_workers else 1
        setup = replace(self._first_setup, num_workers=int(loader.num_workers), max_in_flight=in_flight)
        return self.metrics.recent(setup, num_batches)

    def report(self, loader: DataLoader[Any]) -> Report:
        """Return what was measured, and what it means."""
        autotuner = self._autotuner  # the loop's thread may end the tuning at any time
        tuning = () if autotuner is None else tuple(autotuner.describe())
        return Report(self.observations(loader), self.metrics.report(), DATALOADER, tuning)

    def end_epoch(self, loader: DataLoader[Any]) -> None:
        """Say what would help, if the loop waited in the epoch that it has met the end of, and nobody tunes it."""
        if isinstance(loader.num_workers, AutoWorkers):
            return
        self._teller.tell(self.metrics.elapsed_s, lambda: self.observations(loader))

    def tune(self, loader: DataLoader[Any]) -> None:
        """Change the number of workers, if the loader chooses it and another one is better. Between two batches."""
        if not isinstance(loader.num_workers, AutoWorkers):
            self._autotuner = None
            return
        if self._autotuner is None:
            self._autotuner = self._make_autotuner(loader)
        self._autotuner.check()

    def _make_autotuner(self, loader: DataLoader[Any]) -> Autotuner:
        of_loader = weakref.ref(loader)

        def observe(num_batches: int) -> Observations:
            loader = of_loader()
            assert loader is not None, "it is being iterated over"
            return self.recent(loader, num_batches)

        def resize(num_workers: int) -> None:
            if (loader := of_loader()) is not None:
                loader.resize_to(AutoWorkers(num_workers))

        return Autotuner(int(loader.num_workers), room_for, observe, resize)


def _setup_of(loader: DataLoader[Any]) -> Setup:
    """Return what the loader and its machine have now."""
    batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1
    return setup_of(delivery_of(loader), num_workers=int(loader.num_workers), batch_size=batch_size, has_device=False)
