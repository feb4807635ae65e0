"""A dispatcher whose workers do as those of torch's DataLoader do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from swift_loader import SwiftLoader
from swift_loader.delivery.dispatcher import Dispatcher
from swift_loader.executors.base import Executor
from swift_loader.executors.inline import InlineExecutor
from swift_loader.executors.processes import make_executor, make_starter
from swift_loader.metrics.metrics import Metrics
from swift_loader.options import DeliveryOptions
from swift_loader.sampling.plan import PlanSettings, Uneven
from swift_loader.sampling.shuffle import OrderSettings
from swift_loader.scheduler.delivery import Delivery
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.scheduler import SchedulerSettings
from swift_loader.scheduler.work import WorkSource
from swift_loader.worker.fetch import OnError
from swift_loader.worker.seeding import Rng
from swift_loader.worker.spec import StartMethod, WorkerOptions, WorkerSpec
from swift_loader.worker.torch_worker import TorchMode
from tests.support.work import IndexSource
from tests.unit.scheduler.streams import StreamSource

BASE_SEED = 1234
"""What workers start with."""


def plan_of(base_seed: int) -> PlanSettings:
    """Return a plan that says nothing but the base seed."""
    return PlanSettings(OrderSettings(base_seed, False, 0, 1), 1, 1, 0, Uneven.PAD, drop_last=False)


def as_it_is(samples: Any) -> Any:
    return samples


def worker_spec(
    dataset: Any,
    *,
    rng: Rng = Rng.NONE,
    collate_fn: Any = as_it_is,
    start_method: StartMethod = StartMethod.TEMPLATE,
    **mode: Any,
) -> WorkerSpec:
    """Return the spec for workers; `mode` has fields of `TorchMode`."""
    given = {
        "num_workers": 2,
        "worker_init_fn": None,
        "is_stream": False,
        "auto_collation": True,
        "batch_size": 2,
        "drop_last": False,
        "snapshot_every": 0,
    }
    options = WorkerOptions(
        dataset_class=None,
        dataset_kwargs=None,
        dataset=dataset,
        collate_fn=collate_fn,
        batch_encoder=None,
        rng=rng,
        on_error=OnError.RAISE,
        validate=False,
        start_method=start_method,
        dataset_per_worker=False,
        torch=TorchMode(**{**given, **mode}),
    )
    return WorkerSpec(options, plan_of(BASE_SEED))


@contextmanager
def started(dataset: Any, *, num_workers: int = 2, in_flight: int = 4, **mode: Any) -> Iterator[Dispatcher]:
    """Return a dispatcher that runs. Without workers it builds batches itself."""
    spec = worker_spec(dataset, num_workers=num_workers, **mode)
    of_loader: DeliveryOptions = SwiftLoader(
        dataset=[0], worker_per_consumer=num_workers, data_queue_size=in_flight, worker_restarts=2
    )._options.delivery
    metrics = Metrics(enabled=False)
    executor: Executor
    if num_workers:
        executor = make_executor(make_starter(spec, of_loader), metrics, lambda _: None)
        settings = SchedulerSettings(of_loader.limits, of_loader.max_restarts)
    else:
        executor = InlineExecutor(spec, metrics, None, dataset)
        settings = SchedulerSettings(Limits(1, 1, 1, in_order=True))
    dispatcher = Dispatcher(executor, settings, metrics, deque(maxlen=0))
    dispatcher.start()
    try:
        yield dispatcher
    finally:
        dispatcher.close()


def begin_keys(dispatcher: Dispatcher, batches: Iterable[Any], **options: Any) -> None:
    """Have these batches built: lists of keys, or single keys."""
    begin(dispatcher, IndexSource(0, 0, iter(batches)), **options)


def begin_stream(dispatcher: Dispatcher, num_workers: int = 2, **options: Any) -> None:
    """Have the shards of all workers built in turn."""
    begin(dispatcher, StreamSource(0, num_workers), **options)


def begin(
    dispatcher: Dispatcher, source: WorkSource, *, base_seed: int = BASE_SEED, resume: Mapping[int, bytes] | None = None
) -> None:
    dispatcher.begin(source, plan_of(base_seed), resume)


def rest_of(dispatcher: Dispatcher) -> list[Delivery]:
    """Return what comes until the end."""
    found = []
    while not (delivery := dispatcher.next_batch()).is_end:
        found.append(delivery)
        if len(found) > 10_000:
            raise AssertionError("the work has no end")
    return found
