"""What the failpoints of the processes of a test do: the file that SWIFT_LOADER_FAILPOINTS names.

    SWIFT_LOADER_FAULTS = item;item;...            item = point=action[,condition=value ...]
    worker.collated=SIGKILL,hit=3,serial=0         the third time that the process with serial number 0 reaches it
    template.forked=exit-7,once=/tmp/x/marker      the first time that any process of the run reaches it
    worker.slot-write=SIGSTOP,p=0.01,seed=5        one time in a hundred

All conditions of an item must hold. Points of workers fire only in a process that has said its serial number: the code
of workers runs in other processes, too. Fork-safe: with that, it restarts its counts and random numbers.
"""

from __future__ import annotations

import os
import signal
from enum import Enum
from random import Random

from swift_loader.transport.failpoints import VARIABLE

FAULTS = "SWIFT_LOADER_FAULTS"


def environ_of(text: str) -> dict[str, str]:
    """Return the environment variables of processes that fail as these items say."""
    return {VARIABLE: __file__, FAULTS: text}


class Failpoint(Enum):
    """A point in the code of the package, as `failpoint` names it."""

    WORKER_BOOT = "worker.boot"  # it has said its serial number; it has neither built a dataset nor sent READY
    WORKER_RECEIVED = "worker.received"  # a task was read and queued
    WORKER_STARTED = "worker.started"  # a batch was started, no sample fetched
    WORKER_FETCHED = "worker.fetched"  # all samples were fetched, nothing was collated
    WORKER_SLOT_WRITE = "worker.slot-write"  # a block of the batch was allocated, the next one is requested
    WORKER_COLLATED = "worker.collated"  # the batch was collated, not encoded
    WORKER_BEFORE_COMMIT = "worker.before-commit"  # the batch was encoded, but may not be in a single slot
    WORKER_AFTER_COMMIT = "worker.after-commit"  # the batch or failure is final, but wasn't sent
    WORKER_NOTIFIED = "worker.notified"  # the trainer was notified
    WORKER_STOP = "worker.stop"  # the trainer closed the channel, and the worker is about to end

    TEMPLATE_BOOT = "template.boot"  # the interpreter has started, nothing was received
    TEMPLATE_SET_UP = "template.set-up"  # the payload was received, the dataset wasn't built
    TEMPLATE_BUILT = "template.built"  # the dataset was built, the trainer wasn't notified
    TEMPLATE_FORK_REQUESTED = "template.fork-requested"  # a worker was requested, but not forked
    TEMPLATE_FORKED = "template.forked"  # the worker was forked, the trainer wasn't notified
    TEMPLATE_REAPED = "template.reaped"  # a worker was reaped, the trainer wasn't notified
    TEMPLATE_STOP = "template.stop"  # the trainer closed the channel, and the template is about to end

    CACHE_CLAIMED = "cache.claimed"  # the sample was made, no space is allocated for it
    CACHE_ALLOCATED = "cache.allocated"  # space is allocated, nothing was written
    CACHE_WRITTEN = "cache.written"  # the entry was written, the index doesn't have it
    CACHE_PUBLISHED = "cache.published"  # the index has it, the claim wasn't given up


class Action(Enum):
    """What happens at the point."""

    SIGKILL = "SIGKILL"
    SIGSEGV = "SIGSEGV"
    SIGABRT = "SIGABRT"
    SIGSTOP = "SIGSTOP"
    EXIT_0 = "exit-0"
    EXIT_7 = "exit-7"
    RAISE = "raise"
    STOP_ITERATION = "StopIteration"
    HANG = "hang"


class Item:
    """One item of the variable, with this process's counts. Not thread-safe: processes use it on one thread."""

    def __init__(
        self, what: str, hit: str = "0", serial: str = "-1", p: str = "1", seed: str = "0", once: str = ""
    ) -> None:
        point, _, action = what.partition("=")
        self.point, self.action = Failpoint(point), Action(action)
        self._hit, self._only_serial, self._p, self._seed, self._once = int(hit), int(serial), float(p), seed, once
        if self._hit < 0 or not 0 < self._p <= 1:
            raise ValueError("hit must be at least 0, and p above 0 and at most 1")
        self.identify(-1)

    def identify(self, serial: int) -> None:
        """Restart the counts and the draws. The draws differ from process to process, and are the same in each run."""
        self._serial, self._num_hits = serial, 0
        self._random = Random(f"{self._seed} {self.point.value} {serial}")

    def is_due(self) -> bool:
        """Count a visit. Return whether all conditions hold but `once`."""
        self._num_hits += 1
        return (
            (self._serial >= 0 or not self.point.value.startswith("worker."))
            and self._hit in (0, self._num_hits)
            and self._only_serial in (-1, self._serial)
            and self._random.random() < self._p
        )

    def fire(self) -> None:
        """Fail, unless a process has created the file `once` already."""
        if self._once:
            try:
                os.close(os.open(self._once, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            except FileExistsError:
                return
        if self.action.name.startswith("SIG"):
            signal.raise_signal(signal.Signals[self.action.value])  # returns after SIGSTOP and SIGCONT
        elif self.action in (Action.EXIT_0, Action.EXIT_7):
            os._exit(int(self.action.value.partition("-")[2]))
        elif self.action is not Action.HANG:
            raise (RuntimeError if self.action is Action.RAISE else StopIteration)(f"failpoint {self.point.value}")
        while self.action is Action.HANG:
            try:
                signal.pause()
            except BaseException:
                continue


def parse_faults(text: str) -> list[Item]:
    """Return the items of the variable's value. Raises `ValueError` that names a malformed item."""
    items = []
    for part in filter(None, text.split(";")):
        what, *conditions = part.split(",")
        try:
            if not all("=" in condition for condition in conditions):
                raise ValueError("use condition=value")
            items.append(Item(what, **dict(condition.split("=", 1) for condition in conditions)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{FAULTS}: item {part!r}: {error}") from None
    return items


ITEMS = parse_faults(os.environ.get(FAULTS, ""))


def visit(point: str, serial: int | None = None) -> None:
    """Fail if an item says so. `serial`: begin anew, as the worker with this serial number."""
    if serial is not None:
        for item in ITEMS:
            item.identify(serial)
    # Evaluate all items before the first one fires, because that may raise.
    for item in [item for item in ITEMS if item.point.value == point and item.is_due()]:
        item.fire()
