"""What errors and warnings call the workers, and what they are at: in a loader, and elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from swift_loader.executors.failures import describe_work, keys_of, rebuild, shown
from swift_loader.sampling.plan import Plan
from swift_loader.scheduler.work import Work
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.messages import Failure


@dataclass(frozen=True, slots=True)
class Terms:
    """Words in the sentences about workers."""

    worker: str
    """What does the work."""
    workers: str
    unit: str
    """What a worker gets as one task."""
    units: str
    a_unit: str
    a_result: str
    """What it gives for a task."""
    do: str
    """What it does with a unit."""
    doing: str
    suspect: str
    """What to look at if a unit has ended two workers."""
    code: str
    """What runs in a worker."""
    saving: str
    """What needs less memory."""
    build: str
    """What is done before the first task, as a sentence about the process that does it."""
    starting: str
    """The same as a noun."""
    first_start: str
    if_it_hangs: str = ""
    """What helps if a unit takes too long, as a sentence."""


LOADER_TERMS = Terms(
    worker="worker",
    workers="workers",
    unit="batch",
    units="batches",
    a_unit="a batch",
    a_result="a batch",
    do="build",
    doing="building",
    suspect="its samples",
    code="dataset's code",
    saving="fewer workers or smaller batches",
    build="it builds the dataset",
    starting="building the dataset",
    first_start="the first build of the dataset",
    if_it_hangs=". With on_error='skip', a sample that takes longer than half of timeout is left out",
)


class Wording(Protocol):
    """Puts what is known about workers and their work into the words of whoever uses them."""

    @property
    def terms(self) -> Terms:
        """The words for the sentences of `Explainer`."""
        ...

    def who(self, worker_id: int, num_workers: int, rank: int, place: str) -> str:
        """Return which worker it is, and where it runs."""
        ...

    def work(self, work: Work, plan: Plan) -> str:
        """Return which unit a work is."""
        ...

    def sample(self, work: Work, plan: Plan, position: int | None) -> str:
        """Return at which sample of a unit a worker is, as an addition to `work`; empty if unknown."""
        ...

    def failure(self, failure: Failure, who: str, definitions: Definitions, unit: str) -> Exception:
        """Return the exception for a failure of the user's code. `unit` says at what; empty if unknown."""
        ...

    def restarts(self, max_restarts: int) -> str:
        """Return how many workers in a row are replaced."""
        ...


@dataclass(frozen=True, slots=True)
class LoaderWording:
    """The words of a loader: batches, dataset indices, and its options."""

    terms: Terms = LOADER_TERMS

    def who(self, worker_id: int, num_workers: int, rank: int, place: str) -> str:
        """Return id, rank and place of a worker. After a resize, one with an id beyond the number leaves."""
        left = "" if worker_id < num_workers else ", one of those that leave"
        return f"worker {worker_id} of {max(worker_id + 1, num_workers)} (rank {rank}, {place}{left})"

    def work(self, work: Work, plan: Plan) -> str:
        """Return the number of a batch, its epoch and its dataset indices."""
        return describe_work(work, plan)

    def sample(self, work: Work, plan: Plan, position: int | None) -> str:
        """Return the dataset index at this position of the batch."""
        keys = keys_of(work, plan)
        if position is None or not keys:
            return ""
        return (
            ", with all samples fetched," if position >= len(keys) else f", at dataset index {shown(keys[position])},"
        )

    def failure(self, failure: Failure, who: str, definitions: Definitions, unit: str) -> Exception:
        """Return it with worker, step, sample and batch in its cause."""
        return rebuild(failure, who, definitions, unit and f", {unit}")

    def restarts(self, max_restarts: int) -> str:
        """Return the option."""
        return f"worker_restarts={max_restarts}"


LOADER_WORDING = LoaderWording()
