"""Says in words why a worker died, and decides whether it is replaced. No I/O; not thread-safe: see `Casualties`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from swift_loader.engine.casualties import TEMPLATE, Casualties, Verdict
from swift_loader.engine.failures import attached, died, how_it_ended
from swift_loader.errors import SwiftLoaderError, WorkerDied, WorkerStalled

__all__ = ["Case", "Coroner", "Finding"]


@dataclass(frozen=True, slots=True)
class Case:
    """What is known about a death."""

    who: str
    place: int
    exit_code: int | None
    """As from `os.waitstatus_to_exitcode`; None if it is unknown."""
    batch: Hashable | None
    """The batch that it was building; None if it had none, or one that isn't needed any more."""
    where: str
    """`batch` in words."""
    num_lost: int
    """How many batches it was assigned."""
    stall: str
    """Where it hung, if it was killed for that."""
    traces: str
    """Output of the fault handler, if it crashed."""
    stderr: str
    """The last lines of its stderr."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The decision about a death."""

    error: SwiftLoaderError | None
    """The error for the loop; None if the worker is replaced."""
    notice: str
    """The warning about the replacement."""


class Coroner:
    """Decides about the deaths of one engine's processes."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._casualties = Casualties(max_restarts)

    @property
    def has_open_cases(self) -> bool:
        """Whether there were deaths since the last batch. If not, `note_batch` needn't be called."""
        return self._casualties.is_counting

    def note_batch(self, place: int, batch: Hashable) -> None:
        """Record that a worker built a batch."""
        self._casualties.note_batch(place, batch)

    def forget_batches(self) -> None:
        """Blame no batch for the deaths so far. Called for a new plan, which has other batches."""
        self._casualties.forget_batches()

    def examine(self, case: Case) -> Finding:
        """Decide about a worker that died."""
        verdict = self._casualties.note_death(case.place, case.batch)
        how = case.stall or how_it_ended(case.exit_code)
        at_work = f"; it was building {case.where}" if case.where and not case.stall else ""
        if verdict is Verdict.REPLACE:
            count = f"{self._casualties.num_in_a_row(case.place)} of worker_restarts={self._max_restarts} in a row"
            left = attached(traces=case.traces, stderr=case.stderr)
            return Finding(None, f"{case.who} {how}{at_work}. It is replaced ({count}), and nothing is lost{left}")
        batches = "batch is" if case.num_lost == 1 else "batches are"
        lost = f"{case.num_lost} {batches} lost. {self._reason(verdict, case.place)}"
        if case.stall:
            left = attached(traces=case.traces, stderr=case.stderr)
            return Finding(WorkerStalled(f"{case.who} {how}; {lost}{left}"), "")
        lost = f"{at_work.removeprefix('; ')}, and {lost}" if at_work else lost
        return Finding(died(case.who, case.exit_code, lost, traces=case.traces, stderr=case.stderr), "")

    def examine_template(self, error: WorkerDied) -> Finding:
        """Decide about the template, given the error that says how it died."""
        verdict = self._casualties.note_death(TEMPLATE, None)
        if verdict is Verdict.REPLACE:
            count = f"{self._casualties.num_in_a_row(TEMPLATE)} of worker_restarts={self._max_restarts} in a row"
            return Finding(None, f"{error}\nIt is replaced ({count}) together with its workers, and nothing is lost")
        return Finding(error, "")

    def _reason(self, verdict: Verdict, place: int) -> str:
        if verdict is Verdict.BATCH_IS_TO_BLAME:
            return "The batch has ended two workers, so it isn't tried a third time: look at its samples"
        if not self._max_restarts:
            return "With worker_restarts=0, no worker is replaced"
        number = self._casualties.num_in_a_row(place)
        limit = f"(worker_restarts={self._max_restarts})"
        return f"{number} workers in a row have ended in this place without a batch {limit}"

    def __repr__(self) -> str:
        return f"<Coroner {self._casualties!r}>"
