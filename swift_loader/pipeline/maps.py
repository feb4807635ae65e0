"""The stage that calls a function with each item: its description, and how it opens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from swift_loader.executors.base import Executor
from swift_loader.executors.calls import CallExecutor
from swift_loader.executors.processes import make_executor, make_fleet
from swift_loader.log import logger
from swift_loader.metrics.metrics import Metrics
from swift_loader.options import DeliveryOptions, WorkerType
from swift_loader.pipeline import flows
from swift_loader.pipeline.functions import Kind, Submitted, kind_of
from swift_loader.pipeline.items import Item, Marker
from swift_loader.pipeline.jobs import AwaitPour, Pour, awaited_step, called, on_loop, stepped
from swift_loader.pipeline.nodes import Node, Opening
from swift_loader.pipeline.run import Run
from swift_loader.pipeline.wording import StageWording, item_of
from swift_loader.sampling.plan import PlanSettings
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.scheduler import SchedulerSettings
from swift_loader.worker.fetch import OnError
from swift_loader.worker.seeding import Rng
from swift_loader.worker.spec import StartMethod, WorkerOptions, WorkerSpec
from swift_loader.worker.torch_worker import TorchMode

# A stage in worker processes: the function is the dataset, and each item is a key.
#
# So results come through the workers' slots, a worker that dies is replaced, and its items are done again.


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
    starter = make_fleet(WorkerSpec(options, plan), delivery, StageWording(stage))
    return make_executor(starter, Metrics(enabled=False), logger.debug)


MAX_CONCURRENCY = 1024
"""Of one stage."""

MAX_RESTARTS = 3
"""How many processes in a row with one id are replaced before one of them gives a result."""

MAX_TASKS = 16
"""How many items may wait at one worker."""


class Where(str, Enum):
    """Where the function of a stage runs."""

    THREAD = "thread"
    PROCESS = "process"
    LOOP = "loop"
    """On an event loop: coroutine functions and async generators only."""


class OutputOrder(str, Enum):
    """In which order results come."""

    INPUT = "input"
    COMPLETION = "completion"


@dataclass(frozen=True, slots=True)
class Map(Node):
    """Calls a function with each item."""

    function: Callable[..., Any]
    concurrency: int
    where: Where
    order: OutputOrder
    skips_failures: bool
    max_errors: float | None
    timeout_s: float | None
    max_in_flight: int
    """Items that are worked on, or whose results wait."""
    name: str

    @property
    def counts(self) -> bool:
        """A generator's results are counted."""
        return kind_of(self.function).is_generator

    @property
    def is_exact(self) -> bool:
        """Whether results come in the order of the items."""
        return self.order is OutputOrder.INPUT

    def open(self, items: Iterator[Item], opening: Opening, run: Run) -> Iterator[Item]:
        """Start the workers."""
        in_order, is_generator = self.order is OutputOrder.INPUT, self.counts
        limits = Limits(self.max_in_flight, self.max_in_flight, MAX_TASKS, in_order=in_order)
        restarts = MAX_RESTARTS if self.where is Where.PROCESS else 0
        # In a relay's order, a worker may wait for room.
        leaves_out = self.skips_failures and not (is_generator and in_order and self.where is not Where.PROCESS)
        settings = SchedulerSettings(limits, restarts, None, self.timeout_s, leaves_stalled_out=leaves_out)
        plan = PlanSettings.of_seed(opening.key)
        policy = run.policy(self.name, self.max_errors, skips=self.skips_failures)
        if self.where is Where.PROCESS:
            executor = process_executor(
                self.function, self.concurrency, settings, plan, self.name, gives_list=is_generator
            )
            results = run.stage(items, executor, settings, plan, policy, self.concurrency).results()
            return flows.unbatched(results, opening.start, opening.num_skipped) if is_generator else results
        job = self._job(opening.key)
        loop = run.loop() if self.where is Where.LOOP else None
        calls = CallExecutor(job, loop, self.concurrency, self.name, plan, item_of, leaves_stalled_out=leaves_out)
        stops = [calls.stop_workers, job.close] if isinstance(job, Pour) else [calls.stop_workers]
        goes_on = is_generator and not in_order
        stage = run.stage(items, calls, settings, plan, policy, self.concurrency, stops, goes_on=goes_on)
        if not is_generator:
            return stage.results()
        return stage.all_results(opening.start, opening.num_skipped) if in_order else stage.any_results(opening.start)

    def _job(self, key: int) -> Any:
        in_order = self.order is OutputOrder.INPUT
        match kind_of(self.function):
            case Kind.FUNCTION:
                return called(self.function, key)
            case Kind.COROUTINE:
                return on_loop(self.function)
            case Kind.GENERATOR:
                pours = Pour(self.function, key, self.timeout_s, self.name)
                return pours if in_order else stepped(self.function, key)
            case Kind.ASYNC_GENERATOR:
                return AwaitPour(self.function, self.timeout_s, self.name) if in_order else awaited_step(self.function)

    def num_results(self, num_items: int) -> int | None:
        """As many as items, unless some are left out."""
        return None if self.counts or self.skips_failures else num_items

    def describe(self) -> str:
        """Return the function's name, how many calls run at the same time and where, and the order."""
        places = {Where.THREAD: "thread", Where.PROCESS: "process", Where.LOOP: "coroutine"}
        plural = "es" if self.where is Where.PROCESS else "s"
        place = "executor call" if isinstance(self.function, Submitted) else places[self.where]
        where = f"{self.concurrency} {place}{plural if self.concurrency > 1 else ''}"
        return f"map {self.name}, {where}, in order of {self.order.value}"
