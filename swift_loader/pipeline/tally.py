"""What the stages of a run have done: how many items, how long it took, and which items were left out."""

from __future__ import annotations

import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from swift_loader.errors import OF_ALL_SAMPLES, EncodeError, RemoteTraceback, TooManyErrors, noted, warn
from swift_loader.scheduler.sample_errors import MAX_KEPT_FAILURES

MIN_ITEMS = 100
"""Before the end of a pass, a share counts as if there were at least so many items. If more than half of as many first
items fail, all may."""


# What each stage does. Its threads write, anybody reads.


class Wait(Enum):
    """What the thread of a stage waits for."""

    INPUT = "input"
    OUTPUT = "output"
    NOTHING = "nothing"
    """It has ended, or the stage has no thread."""


@dataclass(slots=True)
class Calls:
    """What the workers of a stage have done. The thread that takes its results writes."""

    concurrency: int
    max_in_flight: int
    """Items that are worked on, or whose results wait."""
    max_waiting: int
    """Items that wait for a worker."""
    num_results: int = 0
    busy_s: float = 0.0
    """How long all calls took together."""
    in_front: float = 0.0
    """How full the queue before the workers was, from 0 to 1, summed over the results."""
    behind: float = 0.0
    """The same of the queue after them."""
    last_s: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    """How long each of the last calls took."""

    def note(self, call_s: float | None) -> None:
        """Record how long a call took; None: it isn't known."""
        if call_s is not None:
            self.busy_s += call_s
            self.last_s.append(call_s)

    def note_queues(self, num_left: int, num_ready: int) -> None:
        """Record how many items are in the stage as a result was taken, and how many of them have their result."""
        self.num_results += 1
        # The one that was taken counts: it had the room of one that waits in front.
        self.in_front += max(0, num_left + 1 - num_ready - self.concurrency) / self.max_waiting
        self.behind += num_ready / self.max_in_flight

    def summary(self, elapsed_s: float) -> dict[str, float]:
        """Return the shares of the time and of the queues, and seconds per call."""
        times, num = sorted(self.last_s.copy()) or [0.0], max(1, self.num_results)
        return {
            "busy": min(1.0, self.busy_s / (elapsed_s * self.concurrency)),
            "call_s_p50": times[len(times) // 2],
            "call_s_p99": times[len(times) * 99 // 100],
            "queue_in_front": self.in_front / num,
            "queue_behind": self.behind / num,
        }


@dataclass(slots=True)
class StageStats:
    """The counts of one stage. Each field has one writer."""

    name: str
    tally: Tally
    calls: Calls | None = None
    """None: the stage has no workers."""
    num_in: int | None = None
    """Items that came from upstream; None: the stage has no thread that counts them."""
    num_out: int = 0
    """Items that were handed on."""
    waited_s: dict[Wait, float] = field(default_factory=lambda: dict.fromkeys(Wait, 0.0))
    """How long its thread has waited, by what for."""
    began_s: float = field(default_factory=time.perf_counter)
    waits_for: Wait = Wait.NOTHING
    """What its thread does now."""
    since_s: float = field(default_factory=time.perf_counter)
    """Since when."""

    def note_wait(self, now_s: float, following: Wait) -> None:
        """Record that a wait is over, and that the next one begins."""
        self.waited_s[self.waits_for] += now_s - self.since_s
        self.since_s, self.waits_for = now_s, following

    def summary(self) -> dict[str, Any]:
        """Return the counts as plain types: items per second, shares of the time; see `Calls.summary`."""
        now_s = self.tally.ended_s or time.perf_counter()
        elapsed_s, current_s = max(1e-9, now_s - self.began_s), max(0.0, now_s - self.since_s)
        input_share, output_share = (
            min(1.0, (self.waited_s[wait] + (current_s if self.waits_for is wait else 0.0)) / elapsed_s)
            for wait in (Wait.INPUT, Wait.OUTPUT)
        )
        return {
            "stage": self.name,
            **({} if self.num_in is None else {"items_in": self.num_in}),
            "items_out": self.num_out,
            "items_per_s": self.num_out / elapsed_s,
            "waiting_for_input": input_share,
            # The thread of a stage that has workers waits for them, too, so its wait says nothing about downstream.
            **({"waiting_for_output": output_share} if self.calls is None else self.calls.summary(elapsed_s)),
        }

    def describe(self) -> str:
        """Return a line: items in and out, items per second; how busy its workers are, or what it waited for."""
        now = self.summary()
        line = f"{'' if self.num_in is None else f'{self.num_in} in, '}{self.num_out} out, {now['items_per_s']:.1f}/s"
        if self.calls is not None:
            times = f"{1e3 * now['call_s_p50']:.3g} ms a call (p99 {1e3 * now['call_s_p99']:.3g})"
            queues = f"{now['queue_in_front']:.0%} full in front, {now['queue_behind']:.0%} behind"
            return f"{line}, busy {now['busy']:.0%}, {times}, queues {queues}"
        longest = max("input", "output", key=lambda name: now[f"waiting_for_{name}"])
        share: float = now[f"waiting_for_{longest}"]
        return f"{line}, waiting for {longest} {share:.0%}" if share >= 0.1 else line  # noqa: PLR2004


@dataclass(slots=True)
class Tally:
    """The counts of all stages of a run."""

    epoch: int = 0
    """The run's first one."""
    max_errors: float | None = None
    """How many items all stages may leave out together; below 1: which share of them; None: any number."""
    num_failed: Iterator[int] | None = None
    """For each stage that has a policy, how many items were left out before the run was resumed."""
    stats: list[StageStats] = field(default_factory=list)
    """In the order of the pipeline."""
    policies: list[FailurePolicy] = field(default_factory=list)
    """Of the stages that have one."""
    failures: deque[ItemFailure] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_FAILURES))
    """The last items that were left out, of all runs. The threads of all stages add."""
    ended_s: float = 0.0
    """When the run was closed; 0: it goes on."""

    def note(self, name: str) -> StageStats:
        """Return the counts of another stage."""
        stats = StageStats(name, self)
        self.stats.append(stats)
        return stats

    def policy(self, stage: str, max_errors: float | None, *, skips: bool) -> FailurePolicy:
        """Return what decides about the failures of another stage."""
        num_before = 0 if self.num_failed is None else next(self.num_failed, 0)
        self.policies.append(FailurePolicy(stage, skips, max_errors, self, num_before))
        return self.policies[-1]

    def __str__(self) -> str:
        """Return what each stage is doing, a line for each."""
        width = max((len(stats.name) for stats in self.stats), default=0)
        return "\n".join(f"  {stats.name:{width}}  {stats.describe()}" for stats in self.stats)

    def report(self) -> dict[str, Any]:
        """Return the counts, and the items that were left out."""
        return {
            "stages": [stats.summary() for stats in self.stats],
            "num_failures": sum(policy.failed.total() for policy in self.policies),
            "failures": [failure for policy in self.policies for failure in policy.kept],
        }


# What becomes of an item whose function raised.


@dataclass(frozen=True, slots=True)
class ItemFailure:
    """An item that was left out."""

    stage: str
    item: int
    """The number of the item among those that came to the stage, from 0, so after a `shuffle` in its order. A run that
    is resumed counts from 0 again. In completion order, the number among the results."""
    exception: BaseException
    """What the function raised, without its frames: they would keep what their variables hold."""
    traceback: str = field(repr=False)


@dataclass(slots=True)
class FailurePolicy:
    """Decides about the failures of one stage, and counts them. One thread uses it."""

    stage: str
    skips: bool
    """False: the first failure ends the run."""
    max_errors: float | None
    """How many items may be left out; below 1: which share of them; None: any number."""
    tally: Tally
    """Has the policies of all stages of the run."""
    num_before: int
    """How many were left out before the run was resumed."""
    places: list[tuple[Any, ...]] | None = field(default_factory=list)
    """Where a run continues after each item that was left out, if their number is limited. None: they aren't kept."""
    epoch: int = 0
    """Which one of the run's it is. All stages count them alike; a later stage meets them later."""
    seen: Counter[int] = field(default_factory=Counter)
    """By epoch: how many items gave results or failed."""
    failed: Counter[int] = field(default_factory=Counter)
    """By epoch: how many were left out."""
    kept: list[ItemFailure] = field(default_factory=list)
    """The first of the run, for the report."""
    _first: ItemFailure | None = None
    """Of the epoch."""
    _last: tuple[int, BaseException] = -1, StopIteration()
    """The item that failed last, and its error."""
    _has_warned: bool = False

    def note(self, item: int, error: BaseException, after: tuple[Any, ...]) -> None:
        """Record that an item failed. Returns if it is left out. `after`: its place.

        Raises the item's error if none may fail, `TooManyErrors` if too many have failed.
        """
        raised = explained(error, self.stage, item)
        if not self.skips or isinstance(error, (BrokenExecutor, *OF_ALL_SAMPLES)) or not isinstance(error, Exception):
            raise raised
        self.failed[self.epoch] += 1
        if self.places is not None and max(self.max_errors or 0, self.tally.max_errors or 0) >= 1:
            self.places.append(after)
        self._last = item, raised
        failure = ItemFailure(self.stage, item, error, "".join(traceback.format_exception(error)))
        self.tally.failures.append(failure)
        self._check(MIN_ITEMS)
        without_frames(raised)
        self._first = self._first or failure
        self.kept += [failure] if len(self.kept) < MAX_KEPT_FAILURES else []
        num, num_items = self.failed[self.epoch], self.seen[self.epoch]
        if num > MIN_ITEMS // 2 and num_items <= MIN_ITEMS and not self._has_warned:
            self._has_warned = True
            warn(f"{num} of {num_items} items failed in stage {self.stage!r}. The first:\n{self._first.traceback}")

    def _check(self, min_items: int) -> None:
        """Raise `TooManyErrors` if too many items were left out. A share is one of at least `min_items`."""
        item, raised = self._last
        for limit, policies, where in (
            (self.max_errors, [self], f"stage {self.stage!r}"),
            (self.tally.max_errors, self.tally.policies, "all stages"),
        ):
            is_share = isinstance(limit, float)
            num = sum(one.failed[self.epoch] + (0 if is_share else one.num_before) for one in policies)
            num_items = max(min_items, *(one.seen[self.epoch] for one in policies)) if is_share else 0
            if limit is not None and num > (limit * num_items if is_share else limit):
                raise TooManyErrors(
                    f"{num}{f' of {num_items}' if is_share else ''} items failed in {where}, more than "
                    f"max_errors={limit}; the last one is item {item} of stage {self.stage!r}"
                ) from raised

    def num_at(self, place: tuple[Any, ...]) -> int:
        """Return how many items were left out that a run doesn't meet again if it continues at this place."""
        return self.num_before + sum(after <= place[: len(after)] for after in self.places or ())

    def end(self) -> None:
        """Sum up an epoch, if items were left out, and begin the next one."""
        num, num_items, first = self.failed[self.epoch], self.seen[self.epoch], self._first
        if first is not None:
            self._check(0)
            what = first.traceback if num == num_items and not self._has_warned else f"{first.exception!r}"
            warn(
                f"{num} of {num_items} items failed in stage {self.stage!r} in epoch {self.tally.epoch + self.epoch}, "
                f"and were left out. The first, item {first.item}: {what}"
            )
        self.epoch, self._first = self.epoch + 1, None


def without_frames(error: BaseException) -> BaseException:
    """Return the error. Its frames, and those of what led to it, are gone."""
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += [inner for inner in (one.__cause__, one.__context__) if inner is not None]
    return error


class _StageNote(RemoteTraceback):
    """Where an error came from, in the chain of its causes."""

    @property
    def stage(self) -> str:
        """The beginning of the text, which names the stage."""
        return self.text.partition(", at item")[0]


def explained(error: BaseException, stage: str, item: int | None) -> BaseException:
    """Return the error, with stage and item at the end of its chain of causes. None: as its workers started."""
    if isinstance(error, StopIteration):  # it would end the loop early
        stop, error = error, RuntimeError("the function of a stage raised StopIteration")
        error.__cause__ = stop
    place = _StageNote(f"In stage {stage!r}, {'as its workers started' if item is None else f'at item {item}'}")
    last, seen = error, {id(error)}
    while (cause := last.__cause__) is not None and id(cause) not in seen:  # `raise error from error` is a circle
        if isinstance(cause, _StageNote) and cause.stage == place.stage:  # the same error was raised for another item
            place.__cause__ = cause.__cause__
            break
        last = cause
        seen.add(id(last))
    if cause is None and not last.__suppress_context__:
        place.__cause__ = last.__context__  # else it would not be shown
    last.__cause__ = place
    return noted(error, place.text.removeprefix("In "))


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
