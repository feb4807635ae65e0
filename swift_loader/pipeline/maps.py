"""The stage that calls a function with each item: its description, and how it opens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from swift_loader.errors import EncodeError, RemoteTraceback, set_cause
from swift_loader.executors.base import Executor
from swift_loader.executors.calls import CallExecutor
from swift_loader.executors.executor import WorkerExecutor
from swift_loader.executors.failures import rebuild_with
from swift_loader.executors.processes import make_fleet
from swift_loader.executors.wording import Explainer
from swift_loader.log import logger
from swift_loader.metrics.metrics import Metrics
from swift_loader.options import DeliveryOptions, WorkerType
from swift_loader.pipeline.functions import JOBS, Function, Submitted
from swift_loader.pipeline.nodes import Node, UnbatchNode
from swift_loader.pipeline.run import PipelineRun
from swift_loader.pipeline.stage import ItemWork, Marker, Opening, Passes, Stage
from swift_loader.pipeline.tally import in_stage_words
from swift_loader.sampling.plan import PlanSettings
from swift_loader.sampling.work import Work
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.scheduler import SchedulerSettings
from swift_loader.worker.spec import WorkerOptions, WorkerSpec
from swift_loader.worker.torch_worker import TorchMode

if TYPE_CHECKING:
    from swift_loader.transport.by_value import Definitions
    from swift_loader.transport.messages import Failure

# What errors and warnings about the workers of a stage say: the stage, the item, and the options of a pipeline.

_CAUSED = "\nThe above exception was the direct cause"
"""How Python introduces an exception that was raised from another one."""


class StageExplainer(Explainer):
    """The sentences about the worker processes of one stage."""

    unit, units = "item", "items"
    code = "stage's function"
    build = "it loads the stage's function"
    restarts = ""
    """No option says the number."""
    if_it_hangs = ""

    def __init__(self, options: DeliveryOptions, stage: str) -> None:
        super().__init__(options)
        self._stage = stage

    def who(self, worker: Any) -> str:
        """Return the process's number, the stage and the process id."""
        return f"process {worker.worker_id} of {self.options.num_workers} of stage {self._stage!r} ({worker.place})"

    def describe(self, work: Work) -> str:
        """Return the item's number."""
        assert isinstance(work, ItemWork), "a feed hands out items"
        return f"item {work.number}"

    def sample(self, work: Work, position: int | None) -> str:  # noqa: ARG002
        """Return nothing: a task is one item."""
        return ""

    def rebuilt(self, failure: Failure, who: str, definitions: Definitions, unit: str = "") -> Exception:
        """Return it with process, stage and item in its cause."""
        context = f"In {who}, {f'at {unit}' if unit else 'as it started'}:"
        error = in_stage_words(rebuild_with(failure, context, definitions))
        if isinstance(error, EncodeError):  # the loader's words are at the end of the traceback
            of_user, _, ours = failure.traceback.partition(_CAUSED)
            set_cause(error, RemoteTraceback(f"{context}\n\n{of_user}" if ours else context))
        return error


# A stage in worker processes: the function is the dataset, and each item is a key.
#
# So results come through the workers' slots, a worker that dies is replaced, and its items are done again.


class CallDataset:
    """A dataset whose samples are a function's results. Its keys are the items."""

    def __init__(self, function: Function) -> None:
        self._function = function.call

    def __getitem__(self, item: Any) -> Any:
        return item if item is Marker.EPOCH_END else self._function(item)


class ListCallDataset(CallDataset):
    """The same for a generator: a sample is the list of all its results."""

    def __getitem__(self, item: Any) -> Any:
        return item if item is Marker.EPOCH_END else list(self._function(item))


def as_it_is(value: Any) -> Any:
    """Return the value."""
    return value


def process_executor(
    calls: CallDataset, num_workers: int, settings: SchedulerSettings, plan: PlanSettings, stage: str
) -> Executor:
    """Return an executor of worker processes. It isn't started.

    `calls` is sent to the processes, and gives the result of each item. `settings`: how far ahead they may work. `plan`
    has the seed of what the function draws. `stage`: its name, for errors.
    """
    options = WorkerOptions(dataset=calls, collate_fn=as_it_is, torch=TorchMode(num_workers))
    limits = settings.limits
    delivery = DeliveryOptions(
        num_workers=num_workers,
        worker_type=WorkerType.PROCESS,
        in_order=limits.in_order,
        max_in_flight=limits.max_in_flight,
        max_ready_per_worker=limits.max_ready_per_worker,
        timeout_s=settings.timeout_s,
        max_restarts=settings.max_restarts,
    )
    fleet = make_fleet(WorkerSpec(options, plan), delivery, StageExplainer(delivery, stage))
    return WorkerExecutor(fleet, Metrics(enabled=False), logger.debug)


MAX_CONCURRENCY = 1024
"""Of one stage."""

MAX_RESTARTS = 3
"""How many processes in a row with one id are replaced before one of them gives a result."""


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
class MapNode(Node):
    """Calls a function with each item."""

    function: Function
    concurrency: int
    where: Where
    order: OutputOrder
    skips_failures: bool
    max_errors: float | None
    timeout_s: float | None
    max_in_flight: int
    """Items that are worked on, or whose results wait."""

    @property
    def counts(self) -> bool:  # type: ignore[override]  # for the others, it is always the same
        """A generator's results are counted."""
        return self.function.kind.is_generator

    @property
    def is_exact(self) -> bool:  # type: ignore[override]
        """Whether results come in the order of the items."""
        return self.order is OutputOrder.INPUT

    @property
    def is_even(self) -> bool:  # type: ignore[override]
        """Not if items are left out, or give any number of results."""
        return not (self.counts or self.skips_failures)

    def open(self, passes: Passes, opening: Opening, run: PipelineRun) -> Passes:
        """Start the workers."""
        in_order, is_generator, is_process = self.is_exact, self.counts, self.where is Where.PROCESS
        limits = Limits(self.max_in_flight, self.max_in_flight, in_order=in_order)
        # In a relay's order, a worker may wait for room.
        leaves_out = self.skips_failures and not (is_generator and in_order and not is_process)
        restarts = MAX_RESTARTS if is_process else 0
        settings = SchedulerSettings(limits, restarts, None, self.timeout_s, leaves_stalled_out=leaves_out)
        plan, name = PlanSettings.of_seed(opening.key), self.function.name
        policy = run.tally.policy(name, self.max_errors, skips=self.skips_failures)
        policy.epoch = opening.epoch - run.epoch
        if is_process:
            calls = (ListCallDataset if is_generator else CallDataset)(self.function)
            executor = process_executor(calls, self.concurrency, settings, plan, name)
            stage = Stage(passes, executor, settings, policy, self.concurrency)
            run.start(stage, plan)
            results = stage.passes(opening)
            return UnbatchNode().flows(results, opening) if is_generator else results
        in_turn, as_ready = JOBS[self.function.kind]
        job = (in_turn if in_order else as_ready)(self.function, opening.key, self.timeout_s)
        loop = run.event_loop.enter() if self.where is Where.LOOP else None
        executor = CallExecutor(job, loop, self.concurrency, name, plan, leaves_stalled_out=leaves_out)
        stage = job.stage(passes, executor, settings, policy, self.concurrency)
        run.start(stage, plan, job)
        return stage.passes(opening)

    def num_results(self, num_items: int) -> int | None:
        """As many as items, unless some are left out."""
        return num_items if self.is_even else None

    def describe(self) -> str:
        """Return the function's name, how many calls run at the same time and where, and the order."""
        places = {Where.THREAD: "thread", Where.PROCESS: "process", Where.LOOP: "coroutine"}
        plural = "es" if self.where is Where.PROCESS else "s"
        place = "executor call" if isinstance(self.function.call, Submitted) else places[self.where]
        where = f"{self.concurrency} {place}{plural if self.concurrency > 1 else ''}"
        return f"map {self.function.name}, {where}, in order of {self.order.value}"
