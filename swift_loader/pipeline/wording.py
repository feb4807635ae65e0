"""What errors and warnings about the workers of a stage say: the stage, the item, and the options of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swift_loader.errors import EncodeError, RemoteTraceback
from swift_loader.executors.failures import rebuild_with
from swift_loader.executors.wording import Terms
from swift_loader.pipeline.feed import ItemWork
from swift_loader.sampling.plan import Plan
from swift_loader.scheduler.work import Work

if TYPE_CHECKING:
    from swift_loader.transport.by_value import Definitions
    from swift_loader.transport.messages import Failure

_TERMS = Terms(
    worker="process",
    workers="processes",
    unit="item",
    units="items",
    a_unit="an item",
    a_result="a result",
    do="work on",
    doing="working on",
    suspect="it",
    code="stage's function",
    saving="a lower concurrency or smaller items",
    build="it loads the stage's function",
    starting="loading the stage's function",
    first_start="loading the stage's function",
)

_HINTS = {
    "dataset._function": ("the function", "Open files and connections in the function itself, or give on='thread'"),
    "the keys of a batch can't be rebuilt": (
        "the item can't be rebuilt",
        "If the script defines its class, name the class in the function, as in `def decode(item: Photo)`, or move it "
        "to a module. Or give on='thread'",
    ),
    "the keys of a batch": (
        "the item",
        "Let it hold paths, numbers, arrays or containers of them, or give on='thread'",
    ),
    "batch": ("the result", "Return arrays, tensors, numbers, strings or containers of them, or give on='thread'"),
}
"""How a message of a loader begins: what to say instead, and what to do."""

_HINT = "Create it in the function, or move the code into a module that can be imported, or give on='thread'"
"""What to do about a variable that the function uses."""


_CAUSED = "\nThe above exception was the direct cause"
"""How Python introduces an exception that was raised from another one."""


@dataclass(frozen=True, slots=True)
class StageWording:
    """The words of one stage."""

    stage: str
    terms: Terms = _TERMS

    def who(self, worker_id: int, num_workers: int, rank: int, place: str) -> str:  # noqa: ARG002
        """Return the process's number, the stage and the process id."""
        return f"process {worker_id} of {num_workers} of stage {self.stage!r} ({place})"

    def work(self, work: Work, plan: Plan) -> str:  # noqa: ARG002
        """Return the item's number."""
        return item_of(work)

    def sample(self, work: Work, plan: Plan, position: int | None) -> str:  # noqa: ARG002
        """Return nothing: a task is one item."""
        return ""

    def failure(self, failure: Failure, who: str, definitions: Definitions, unit: str) -> Exception:
        """Return it with process, stage and item in its cause."""
        where = f"at {unit}" if unit else "as it started"
        context = f"In {who}, {where}:"
        error = in_stage_words(rebuild_with(failure, context, definitions))
        if isinstance(error, EncodeError):  # the loader's words are at the end of the traceback
            of_user, _, ours = failure.traceback.partition(_CAUSED)
            error.__cause__ = RemoteTraceback(f"{context}\n\n{of_user}" if ours else context)
        return error

    def restarts(self, max_restarts: int) -> str:
        """Return the number: no option says it."""
        return str(max_restarts)


def item_of(work: Work) -> str:
    """Return which item of its stage a work is."""
    assert isinstance(work, ItemWork), "a feed hands out items"
    return f"item {work.number}"


def in_stage_words(error: Exception) -> Exception:
    """Return the error about something that can't be sent in the words of a stage, other errors as they are."""
    if not isinstance(error, EncodeError):
        return error
    fact, hint = error.fact, _HINT
    for beginning, (instead, remedy) in _HINTS.items():
        if fact.startswith(beginning):
            fact, hint = instead + fact.removeprefix(beginning), remedy
            break
    told = EncodeError(fact, hint)
    told.__cause__ = error.__cause__
    return told
