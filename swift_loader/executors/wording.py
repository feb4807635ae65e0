"""What errors and warnings say about workers: who, how it ended, at which batch, and what follows.

`Wording` has the words of a loader; whoever uses workers for something else has a subclass.
"""

from __future__ import annotations

import signal
import textwrap
from dataclasses import dataclass
from typing import Protocol

from swift_loader.errors import NoProcessesLeft, SwiftLoaderError, WorkerDied, WorkerStalled
from swift_loader.executors.failures import describe_work, keys_of, rebuild, rebuild_sample, shown
from swift_loader.executors.handle import Handle
from swift_loader.options import DeliveryOptions
from swift_loader.sampling.plan import Plan
from swift_loader.scheduler.failures import Decision
from swift_loader.scheduler.messages import Stall, TemplateLost, WorkerLost
from swift_loader.scheduler.sample_errors import SampleFailure
from swift_loader.scheduler.work import Work
from swift_loader.threads import limits_of_processes
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.channel import out_of_descriptors_error
from swift_loader.transport.messages import Failure, FailureStage, SampleFailed
from swift_loader.worker.process import NO_DESCRIPTORS_LEFT, NO_PROCESSES_LEFT


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


class Wording:
    """Puts what is known about workers and their work into words: of a loader, unless a subclass has others."""

    terms = LOADER_TERMS
    """The words for the sentences of `Explainer`."""

    def who(self, worker_id: int, num_workers: int, rank: int, place: str) -> str:
        """Return id, rank and place of a worker. After a resize, one with an id beyond the number leaves."""
        left = "" if worker_id < num_workers else ", one of those that leave"
        return f"worker {worker_id} of {max(worker_id + 1, num_workers)} (rank {rank}, {place}{left})"

    def work(self, work: Work, plan: Plan) -> str:
        """Return which unit a work is: the number of a batch, its epoch and its dataset indices."""
        return describe_work(work, plan)

    def sample(self, work: Work, plan: Plan, position: int | None) -> str:
        """Return at which sample of a unit a worker is, as an addition to `work`; empty if unknown."""
        keys = keys_of(work, plan)
        if position is None or not keys:
            return ""
        return (
            ", with all samples fetched," if position >= len(keys) else f", at dataset index {shown(keys[position])},"
        )

    def failure(self, failure: Failure, who: str, definitions: Definitions, unit: str) -> Exception:
        """Return the exception for a failure of the user's code. `unit` says at what; empty if unknown."""
        return rebuild(failure, who, definitions, unit and f", {unit}")

    def restarts(self, max_restarts: int) -> str:
        """Return how many workers in a row are replaced."""
        return f"worker_restarts={max_restarts}"


LOADER_WORDING = Wording()


# How a process ended --------------------------------------------------------------------------------------------------

_SIGKILL = 9
"""Windows has no `signal.SIGKILL`."""


def how_it_ended(exit_code: int | None) -> str:
    """Return in words how a process ended."""
    if exit_code is None:
        return "ended with an unknown exit status"
    return f"was ended by {_signal_name(-exit_code)}" if exit_code < 0 else f"exited with code {exit_code}"


def died(
    who: str,
    exit_code: int | None,
    consequence: str,
    *,
    traces: str = "",
    stderr: str = "",
    terms: Terms = LOADER_TERMS,
) -> WorkerDied:
    """Return the error for a process that died.

    `exit_code`: as from `os.waitstatus_to_exitcode`; None: unknown. `consequence`: what it means for the loop.
    `traces`: output of the fault handler, if it crashed. `stderr`: its last lines. `terms`: the words for the hint.
    """
    hint = ""
    if exit_code == NO_PROCESSES_LEFT:
        return NoProcessesLeft(f"{who} could start no thread or process; {consequence}. {limits_of_processes()}")
    if exit_code == NO_DESCRIPTORS_LEFT:
        hint = f". It ran out of file descriptors: {str(out_of_descriptors_error()).partition('file descriptors: ')[2]}"
    elif exit_code == -_SIGKILL:
        hint = f". The kernel sends SIGKILL when memory runs out: see dmesg, and use {terms.saving}"
    elif exit_code is not None and exit_code < 0:
        hint = f". The {terms.code}, or a library that it uses, crashed"
    elif exit_code is not None:
        hint = f". If its stderr has no reason, the {terms.code} ended it: look for sys.exit and os._exit"
    return WorkerDied(f"{who} {how_it_ended(exit_code)}; {consequence}{hint}{attached(traces=traces, stderr=stderr)}")


def attached(*, traces: str = "", stderr: str = "") -> str:
    """Return a process's stack and stderr as the end of a message; empty if there are none."""
    parts = [("Its Python stack", traces), ("The last lines of its stderr", stderr)]
    return "".join(f"\n{title}:\n{textwrap.indent(text, '    ')}" for title, text in parts if text)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


# Workers, and what they are at ----------------------------------------------------------------------------------------

BEFORE_TASKS = (FailureStage.BUILD, FailureStage.SET_UP)
"""A worker that fails in one of these stages takes no tasks."""

GRACE_BUILDS = 3
"""When no worker has the batch, a new build of the dataset may take this many times as long as the first one."""


class Spoken(Protocol):
    """A worker, as far as words need it."""

    @property
    def worker_id(self) -> int:
        """Which of the n workers it is, from 0."""
        ...

    @property
    def place(self) -> str:
        """Where it runs."""
        ...

    def position_in_batch(self) -> int | None:
        """Return the position of the sample that it is fetching; None if unknown."""
        ...


class Explainer:
    """The words for one executor's workers."""

    def __init__(
        self,
        options: DeliveryOptions,
        plan: Plan,
        definitions: Definitions,
        build_s: float,
        wording: Wording = LOADER_WORDING,
    ) -> None:
        self.current = (0, plan)
        """The generation whose batches are needed, and its plan. Replaced as a whole: several threads read it."""
        self.build_s = build_s
        """Seconds that the first build of the dataset took."""
        self.options = options
        """The executor replaces them when the number of workers changes."""
        self._rank = plan.settings.rank
        self._definitions = definitions
        self._wording = wording
        self._terms = wording.terms

    def who(self, worker: Spoken) -> str:
        """Return which worker it is, and where it runs."""
        return self._wording.who(worker.worker_id, self.options.num_workers, self._rank, worker.place)

    def batch(self, work: Work) -> str:
        """Return which batch a work is."""
        return self._wording.work(work, self.current[1])

    # What a worker reports --------------------------------------------------------------------------------------------

    def is_needed(self, generation: int) -> bool:
        """Return whether batches of this generation are needed."""
        return generation == self.current[0]

    def failure(self, failure: Failure, worker: Handle) -> Exception:
        """Return the exception for a failure of the user's code in a worker."""
        is_known = bool(worker.tasks) and self.is_needed(failure.generation) and failure.stage not in BEFORE_TASKS
        return self._rebuilt(failure, worker, self.batch(worker.tasks[0].work) if is_known else "")

    def sample_failure(self, failed: SampleFailed, worker: Handle) -> SampleFailure:
        """Return the record of a sample that failed in the batch of the worker's oldest task."""
        task = worker.tasks[0]
        error = self._rebuilt(failed.failure, worker, self.batch(task.work))
        return rebuild_sample(failed, task.work.epoch, task.work.step, error)

    def _rebuilt(self, failure: Failure, worker: Handle, batch: str) -> Exception:
        return self._wording.failure(failure, self.who(worker), self._definitions, batch)

    # Workers that hang ------------------------------------------------------------------------------------------------

    def stall(self, stall: Stall, worker: Spoken) -> str:
        """Return where a worker has been for how long."""
        if stall.work is None:
            return f"has been at {self._terms.a_unit} that isn't needed any more for {stall.busy_s:.1f} s"
        sample = self._wording.sample(stall.work, self.current[1], worker.position_in_batch())
        return f"has been at {self.batch(stall.work)}{sample} for {stall.busy_s:.1f} s"

    def hang(self, stall: Stall, worker: Handle) -> str:
        """Return why a worker is being killed."""
        return f"{self.stall(stall, worker)}, longer than timeout={self.options.timeout_s:g} s, and was killed"

    def stall_error(self, stall: Stall, worker: Spoken, stacks: str) -> WorkerStalled:
        """Return the error for a worker that takes too long and isn't replaced."""
        return WorkerStalled(
            f"{self.who(worker)} {self.stall(stall, worker)}, longer than timeout={self.options.timeout_s:g} s{stacks}"
        )

    def no_worker(self, stall: Stall) -> str:
        """Return which batch no worker is ready to build."""
        terms = self._terms
        unit = terms.a_unit if stall.work is None else self.batch(stall.work)
        return f"no {terms.worker} is ready to {terms.do} {unit}"

    def no_worker_error(self, stall: Stall) -> WorkerStalled:
        """Return the error for a batch that no worker has taken for too long."""
        terms = self._terms
        return WorkerStalled(
            f"{self.no_worker(stall)}, for longer than timeout={self.options.timeout_s:g} s plus {GRACE_BUILDS} "
            f"times the {self.build_s:.1f} s that {terms.first_start} took. If {terms.workers} need longer to start, "
            f"raise timeout; else find out what {terms.starting} waits for"
        )

    # Workers that died ------------------------------------------------------------------------------------------------

    def replacement(self, case: WorkerLost, worker: Handle) -> str:
        """Return the notice of a worker that died and is replaced."""
        hang, death = worker.hang, case.death
        how = how_it_ended(death.exit_code) if hang is None else hang.text
        left = attached(traces=death.traces if hang is None else hang.traces, stderr=death.stderr)
        at_work = self._at_work(case) if hang is None else ""
        is_replaced = case.decision is Decision.REPLACE
        what = f"It is replaced ({self._count(case)}), and" if is_replaced else "It was to leave anyway, and"
        return f"{self.who(worker)} {how}{at_work}. {what} nothing is lost{left}"

    def death(self, case: WorkerLost, worker: Handle) -> SwiftLoaderError:
        """Return the error for a worker that died and isn't replaced."""
        hang, death = worker.hang, case.death
        terms = self._terms
        lost_are = f"{terms.unit} is" if case.num_lost == 1 else f"{terms.units} are"
        lost = f"{case.num_lost} {lost_are} lost. {self._reason(case)}"
        if hang is not None:
            left = attached(traces=hang.traces, stderr=death.stderr)
            hint = terms.if_it_hangs if hang.is_at_sample else ""
            return WorkerStalled(f"{self.who(worker)} {hang.text}; {lost}{hint}{left}")
        at_work = self._at_work(case).removeprefix("; ")
        lost = f"{at_work}, and {lost}" if at_work else lost
        return died(self.who(worker), death.exit_code, lost, traces=death.traces, stderr=death.stderr, terms=terms)

    def template_replacement(self, case: TemplateLost) -> str:
        """Return the notice of a template that died and is replaced."""
        replaced = f"It is replaced ({self._count(case)}) together with its {self._terms.workers}"
        return f"{case.error}\n{replaced}, and nothing is lost"

    def _at_work(self, case: WorkerLost) -> str:
        if case.work is None:
            return ""
        return f"; it was {self._terms.doing} {self.batch(case.work)}"

    def _count(self, case: WorkerLost | TemplateLost) -> str:
        return f"{case.num_in_a_row} of {self._wording.restarts(self.options.max_restarts)} in a row"

    def _reason(self, case: WorkerLost) -> str:
        terms = self._terms
        if case.decision is Decision.BATCH_IS_TO_BLAME:
            blamed = f"The {terms.unit} has ended two {terms.workers}"
            return f"{blamed}, so it isn't tried a third time: look at {terms.suspect}"
        max_restarts = self.options.max_restarts
        if not max_restarts:
            return f"With {self._wording.restarts(0)}, no {terms.worker} is replaced"
        limit = f"({self._wording.restarts(max_restarts)})"
        return f"{case.num_in_a_row} {terms.workers} in a row with this id have ended without {terms.a_result} {limit}"
