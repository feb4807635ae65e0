"""What errors and warnings say about workers: who, how it ended, at which batch, and what follows.

`Explainer` has the sentences for a loader's workers; whoever uses workers for something else has a subclass.
"""

from __future__ import annotations

import signal
import textwrap
from typing import Any

from swift_loader.errors import NoProcessesLeft, SwiftLoaderError, WorkerDied, WorkerStalled, noted
from swift_loader.executors.failures import describe_work, keys_of, place_of, rebuild, rebuild_sample, shown
from swift_loader.executors.handle import Handle
from swift_loader.options import DeliveryOptions
from swift_loader.ranks.ranks import expected_ranks
from swift_loader.runtime import limits_of_processes
from swift_loader.sampling.plan import Plan
from swift_loader.sampling.work import Work
from swift_loader.scheduler.messages import Send, Stall, TemplateLost, WorkerLost
from swift_loader.scheduler.restarts import Decision
from swift_loader.scheduler.sample_errors import SampleFailure
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.channel import out_of_descriptors_error
from swift_loader.transport.messages import Failure, SampleFailed
from swift_loader.worker.process import NO_DESCRIPTORS_LEFT, NO_PROCESSES_LEFT
from swift_loader.worker.spec import WorkerSpec

_SIGKILL = 9
"""Windows has no `signal.SIGKILL`."""

GRACE_BUILDS = 3
"""When no worker has the batch, a new build of the dataset may take this many times as long as the first one."""


def how_it_ended(exit_code: int | None) -> str:
    """Return in words how a process ended. `exit_code`: as from `os.waitstatus_to_exitcode`; None: unknown."""
    if exit_code is None:
        return "ended with an unknown exit status"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was ended by {signal.Signals(-exit_code).name}"
    except ValueError:  # a real-time signal
        return f"was ended by signal {-exit_code}"


def rank_in(spec: WorkerSpec) -> int:
    """Return the rank for messages. The plan of a DataLoader's workers doesn't know it."""
    return spec.plan.rank if spec.options.torch is None else expected_ranks(None).rank


def attached(*, traces: str = "", stderr: str = "") -> str:
    """Return a process's stack and stderr as the end of a message; empty if there are none."""
    parts = [("Its Python stack", traces), ("The last lines of its stderr", stderr)]
    return "".join(f"\n{title}:\n{textwrap.indent(text, '    ')}" for title, text in parts if text)


class Explainer:
    """The sentences about one executor's workers: those of a loader, unless a subclass has others.

    A worker is a `Handle`, or a worker thread: it has an id, a place, and a position in its batch.
    """

    unit, units = "batch", "batches"
    """What a worker gets as one task."""
    code = "dataset's code"
    """What runs in a worker."""
    build = "it builds the dataset"
    """What a process does before its first task."""
    restarts = "worker_restarts="
    """What is in front of the number of workers in a row that are replaced: the option."""
    if_it_hangs = ". With on_error='skip', a sample that takes longer than half of timeout is left out"
    """What helps if a unit takes too long."""

    current: tuple[int, Plan]
    """The generation whose batches are needed, and its plan. Replaced as a whole: several threads read it. Known after
    `begin`, as the next two."""
    build_s: float
    """Seconds that the first build of the dataset took."""
    _definitions: Definitions

    def __init__(self, options: DeliveryOptions, rank: int = 0) -> None:
        self.options = options
        """The executor replaces them when the number of workers changes."""
        self._rank = rank

    def begin(self, plan: Plan, definitions: Definitions, build_s: float) -> None:
        """Take in what is known once the dataset is built."""
        self.current, self._definitions, self.build_s = (0, plan), definitions, build_s

    # What a subclass may say otherwise --------------------------------------------------------------------------------

    def who(self, worker: Any) -> str:
        """Return id, rank and place of a worker. After a resize, one with an id beyond the number leaves."""
        num_workers = self.options.num_workers
        left = "" if worker.worker_id < num_workers else ", one of those that leave"
        num = max(worker.worker_id + 1, num_workers)
        return f"worker {worker.worker_id} of {num} (rank {self._rank}, {worker.place}{left})"

    def describe(self, work: Work) -> str:
        """Return which unit a work is: the number of a batch, its epoch and its dataset indices."""
        return describe_work(work, self.current[1])

    def sample(self, work: Work, position: int | None) -> str:
        """Return at which sample of a unit a worker is, as an addition to `describe`; empty if unknown."""
        keys = keys_of(work, self.current[1])
        if position is None or not keys:
            return ""
        return (
            ", with all samples fetched," if position >= len(keys) else f", at dataset index {shown(keys[position])},"
        )

    def rebuilt(self, failure: Failure, who: str, definitions: Definitions, unit: str = "") -> Exception:
        """Return the exception for a failure of the user's code. `unit` says at what; empty if unknown."""
        return rebuild(failure, who, definitions, unit and f", {unit}")

    # What a worker reports --------------------------------------------------------------------------------------------

    def is_needed(self, generation: int) -> bool:
        """Return whether batches of this generation are needed."""
        return generation == self.current[0]

    def failure(self, failure: Failure, worker: Handle, task: Send | None = None) -> Exception:
        """Return the exception for a failure of the user's code in a worker. `task`: None: before it takes any."""
        work = None if task is None or not self.is_needed(task.generation) else task.work
        error = self.rebuilt(failure, self.who(worker), self._definitions, "" if work is None else self.describe(work))
        if work is None or self.unit != "batch":  # whoever uses workers for something else notes its own place
            return error
        return noted(error, place_of(work, self._rank, worker.worker_id, failure.index))

    def sample_failure(self, failed: SampleFailed, worker: Handle, work: Work) -> SampleFailure:
        """Return the record of a sample that failed in a batch."""
        error = self.rebuilt(failed.failure, self.who(worker), self._definitions, self.describe(work))
        return rebuild_sample(failed, work, error)

    # Workers that hang ------------------------------------------------------------------------------------------------

    def stall(self, stall: Stall, worker: Any) -> str:
        """Return where a worker has been for how long."""
        if stall.work is None:
            return f"has been at work that isn't needed any more for {stall.busy_s:.1f} s"
        sample = self.sample(stall.work, worker.position_in_batch())
        return f"has been at {self.describe(stall.work)}{sample} for {stall.busy_s:.1f} s"

    def hang(self, stall: Stall, worker: Any) -> str:
        """Return where a worker is that takes too long."""
        return f"{self.stall(stall, worker)}, longer than timeout={self.options.timeout_s:g} s"

    def no_worker(self, stall: Stall) -> str:
        """Return which batch no worker is ready to build."""
        return f"no worker is ready for {'more work' if stall.work is None else self.describe(stall.work)}"

    def no_worker_error(self, stall: Stall) -> WorkerStalled:
        """Return the error for a batch that no worker has taken for too long."""
        return WorkerStalled(
            f"{self.no_worker(stall)}, for longer than timeout={self.options.timeout_s:g} s plus {GRACE_BUILDS} "
            f"times the {self.build_s:.1f} s that the first start took. If workers need longer to start, raise "
            f"timeout; else find out what a worker waits for as {self.build}"
        )

    # Workers that died ------------------------------------------------------------------------------------------------

    def died(
        self, who: str, exit_code: int | None, consequence: str, *, traces: str = "", stderr: str = ""
    ) -> WorkerDied:
        """Return the error for a process that died.

        `exit_code`: see `how_it_ended`. `consequence`: what it means for the loop. `traces`: output of the fault
        handler, if it crashed. `stderr`: its last lines.
        """
        hint = ""
        if exit_code == NO_PROCESSES_LEFT:
            return NoProcessesLeft(f"{who} could start no thread or process; {consequence}. {limits_of_processes()}")
        if exit_code == NO_DESCRIPTORS_LEFT:
            _, _, limits = str(out_of_descriptors_error()).partition("file descriptors: ")
            hint = f". It ran out of file descriptors: {limits}"
        elif exit_code == -_SIGKILL:
            saving = f"fewer workers or smaller {self.units}"
            hint = f". The kernel sends SIGKILL when memory runs out: see dmesg, and use {saving}"
        elif exit_code is not None and exit_code < 0:
            hint = f". The {self.code}, or a library that it uses, crashed"
        elif exit_code is not None:
            hint = f". If its stderr has no reason, the {self.code} ended it: look for sys.exit and os._exit"
        left = attached(traces=traces, stderr=stderr)
        return WorkerDied(f"{who} {how_it_ended(exit_code)}; {consequence}{hint}{left}")

    def replacement(self, case: WorkerLost, worker: Handle) -> str:
        """Return the notice of a worker that died and is replaced."""
        hang, death = worker.hang, case.death
        is_replaced = case.decision is Decision.REPLACE
        what = f"It is replaced ({self._count(case)}), and" if is_replaced else "It was to leave anyway, and"
        if hang is not None:
            left = attached(traces=hang.traces, stderr=death.stderr)
            return f"{self.who(worker)} {hang.text}. {what} nothing is lost{left}"
        at_work = "" if case.work is None else f"; it was at {self.describe(case.work)}"
        left = attached(traces=death.traces, stderr=death.stderr)
        return f"{self.who(worker)} {how_it_ended(death.exit_code)}{at_work}. {what} nothing is lost{left}"

    def death(self, case: WorkerLost, worker: Handle) -> SwiftLoaderError:
        """Return the error for a worker that died and isn't replaced."""
        hang, death = worker.hang, case.death
        lost = f"{self.unit} is" if case.num_lost == 1 else f"{self.units} are"
        consequence = f"{case.num_lost} {lost} lost. {self._reason(case)}"
        if hang is not None:
            left = attached(traces=hang.traces, stderr=death.stderr)
            hint = self.if_it_hangs if hang.is_at_sample else ""
            return WorkerStalled(f"{self.who(worker)} {hang.text}; {consequence}{hint}{left}")
        if case.work is not None:
            consequence = f"it was at {self.describe(case.work)}, and {consequence}"
        return self.died(self.who(worker), death.exit_code, consequence, traces=death.traces, stderr=death.stderr)

    def template_replacement(self, case: TemplateLost) -> str:
        """Return the notice of a template that died and is replaced."""
        return f"{case.error}\nIt is replaced ({self._count(case)}) together with its workers, and nothing is lost"

    def _count(self, case: WorkerLost | TemplateLost) -> str:
        return f"{case.num_in_a_row} of {self.restarts}{self.options.max_restarts} in a row"

    def _reason(self, case: WorkerLost) -> str:
        if case.decision is Decision.BATCH_IS_TO_BLAME:
            return f"The {self.unit} has ended two workers, so it isn't tried a third time: look at what is in it"
        limit = f"{self.restarts}{self.options.max_restarts}"
        if not self.options.max_restarts:
            return f"With {limit}, no worker is replaced"
        return f"{case.num_in_a_row} workers in a row with this id have ended without a result ({limit})"
