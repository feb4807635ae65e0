"""A stage in worker processes: the function is the dataset, and each item is a key.

So results come through the workers' slots, a worker that dies is replaced, and its items are done again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swift_loader.executors.base import Executor
from swift_loader.executors.processes import make_executor, make_starter
from swift_loader.log import logger
from swift_loader.metrics.metrics import Metrics
from swift_loader.options import DeliveryOptions, WorkerType
from swift_loader.pipeline.items import Marker
from swift_loader.pipeline.wording import StageWording
from swift_loader.sampling.plan import PlanSettings
from swift_loader.scheduler.scheduler import SchedulerSettings
from swift_loader.worker.fetch import OnError
from swift_loader.worker.seeding import Rng
from swift_loader.worker.spec import StartMethod, WorkerOptions, WorkerSpec
from swift_loader.worker.torch_mode import TorchMode


class Calls:
    """A dataset whose samples are a function's results. Its keys are the items."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __getitem__(self, item: Any) -> Any:
        return item if item is Marker.EPOCH_END else self._function(item)


class ListCalls(Calls):
    """The same for a generator: a sample is the list of all its results."""

    def __getitem__(self, item: Any) -> Any:
        return item if item is Marker.EPOCH_END else list(self._function(item))


def as_it_is(value: Any) -> Any:
    """Return the value."""
    return value


def process_executor(
    function: Callable[[Any], Any],
    num_workers: int,
    settings: SchedulerSettings,
    plan: PlanSettings,
    stage: str,
    *,
    gives_list: bool,
) -> Executor:
    """Return an executor of worker processes. It isn't started.

    `function` is called with each item. It is sent to the processes. `settings`: how far ahead they may work. `plan`
    has the seed of what the function draws. `stage`: its name, for errors. `gives_list`: the function is a generator.
    """
    mode = TorchMode(
        num_workers, None, is_stream=False, auto_collation=False, batch_size=1, drop_last=False, snapshot_every=0
    )
    options = WorkerOptions(
        dataset_class=None,
        dataset_kwargs=None,
        dataset=(ListCalls if gives_list else Calls)(function),
        collate_fn=as_it_is,
        batch_encoder=None,
        rng=Rng.SAMPLE,
        on_error=OnError.RAISE,
        validate=False,
        start_method=StartMethod.TEMPLATE,
        dataset_per_worker=False,
        torch=mode,
    )
    limits = settings.limits
    delivery = DeliveryOptions(
        num_workers=num_workers,
        worker_type=WorkerType.PROCESS,
        in_order=limits.in_order,
        max_in_flight=limits.max_in_flight,
        max_ready_per_worker=limits.max_ready_per_worker,
        max_tasks=limits.max_tasks,
        thread_per_worker=True,
        batch_decoder=None,
        timeout_s=settings.timeout_s,
        stall_warning_s=None,
        max_restarts=settings.max_restarts,
        max_on_device=1,
        pin_memory=False,
    )
    starter = make_starter(WorkerSpec(options, plan), delivery, StageWording(stage))
    return make_executor(starter, Metrics(enabled=False), logger.debug)
