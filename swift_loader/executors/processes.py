"""Chooses how worker processes are started, and the executor that goes with it.

What a choice needs is imported once it is chosen: `executors.process.fleet` and what it uses exist on Linux only.
"""

from __future__ import annotations

import sys
from dataclasses import replace

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
