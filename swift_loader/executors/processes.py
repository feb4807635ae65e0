"""Chooses how worker processes are started, and the executor that goes with it.

What a choice needs is imported once it is chosen: `executors.process` can be imported on Linux only.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from swift_loader.executors.fleet import Fleet
from swift_loader.executors.wording import Explainer
from swift_loader.options import DeliveryOptions
from swift_loader.worker.spec import StartMethod, WorkerSpec

PLATFORM = sys.platform
"""A name of its own, so that a test can be elsewhere."""


def can_fork() -> bool:
    """Return whether workers can be forks of this process."""
    return StartMethod.FORK.on(PLATFORM) is StartMethod.FORK


def warm_up(start_method: StartMethod, modules: tuple[str, ...]) -> None:
    """Begin in the background what all processes of this start method share. Returns at once, and raises no error.

    `modules`: what the dataset will import.
    """
    if start_method.on(PLATFORM) is StartMethod.TEMPLATE:
        from swift_loader.executors.process.root import ROOTS

        ROOTS.warm(modules)


def make_fleet(spec: WorkerSpec, options: DeliveryOptions, explainer: Explainer | None = None) -> Fleet:
    """Return the fleet that the options and the platform demand. It starts nothing yet.

    `explainer` has the words for its workers; None: those of a loader.
    """
    explainer = explainer or Explainer(options, spec.plan.rank)
    if options.executor is not None:
        from swift_loader.executors.ray.fleet import ActorFleet, MixedFleet

        remote = ActorFleet(spec, options, options.executor, explainer)
        if not options.num_local:
            return remote
        here = replace(options, num_workers=options.num_local, executor=None, num_local=0)
        return MixedFleet(make_fleet(spec, here, explainer), remote)
    if spec.options.start_method.on(PLATFORM) is StartMethod.PORTABLE:
        from swift_loader.executors.portable.fleet import InterpreterFleet

        return InterpreterFleet(spec, options, explainer)
    from swift_loader.executors.process.fleet import TemplateFleet

    return TemplateFleet(spec, options, explainer)


# What a program may see of the processes, under the names that torch's iterators have ---------------------------------


class ProcessView:
    """One worker process, as a `multiprocessing.Process` shows it. The loader owns the process. Any thread."""

    daemon = True

    def __init__(self, worker_id: int, process: Any) -> None:
        """`process`: see `Handle`."""
        self.name = f"DataLoader worker {worker_id}"
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id."""
        return int(self._process.pid)

    ident = pid

    @property
    def exitcode(self) -> int | None:
        """Its exit code, negative for a signal. None until it has ended. 0 if the loader ended it."""
        exit_code: int | None = self._process.exit_code
        return exit_code

    def is_alive(self) -> bool:
        """Return whether it runs."""
        return not self._process.has_ended

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, or for `timeout` seconds."""
        self._process.wait_end(timeout)

    def terminate(self) -> None:
        """Send SIGTERM. The loader replaces the worker if it goes on."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL. The loader replaces the worker if it goes on."""
        self._process.kill()

    def __repr__(self) -> str:
        return f"<{self.name}, pid {self.pid}{'' if self.is_alive() else ', ended'}>"


def processes_of(fleet: Fleet | None) -> list[ProcessView]:
    """Return the processes of the workers, by id. None if there is no fleet."""
    found = [] if fleet is None else fleet.processes()
    return [ProcessView(number, process) for number, process in enumerate(found)]
