"""Points in the code where a test can make a process fail, so that each fault happens at a chosen place.

They do nothing unless SWIFT_LOADER_FAILPOINTS is set when this module is imported: `failpoint` is an empty function
then. The template and the workers inherit the variable from the trainer.

    SWIFT_LOADER_FAILPOINTS = item;item;...        item = point=action[,condition=value ...]
    worker.collated=SIGKILL,hit=3,serial=0         the third time that the process with serial number 0 reaches it
    template.forked=exit-7,once=/tmp/x/marker      the first time that any process of the run reaches it
    getitem=raise,p=0.01,seed=5                    one time in a hundred

All conditions of an item must hold. Items are independent of each other. Fork-safe: a process restarts its counts and
random numbers when it calls `identify`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import NoReturn

__all__ = ["VARIABLE", "Action", "Failpoint", "FailpointSpec", "failpoint", "identify", "parse_failpoints"]

VARIABLE = "SWIFT_LOADER_FAILPOINTS"

_WORKER_PREFIX = "worker."


class Failpoint(Enum):
    """A point. Points of workers fire only after `identify`: the code of workers runs in other processes, too."""

    WORKER_BOOT = "worker.boot"  # worker: it has called `identify`; it has neither built a dataset nor sent READY
    WORKER_RECEIVED = "worker.received"  # worker: a task was read and queued; the trial batch is a task, too
    WORKER_STARTED = "worker.started"  # worker: a batch was started, no sample fetched
    WORKER_FETCHED = "worker.fetched"  # worker: all samples were fetched, nothing was collated
    WORKER_SLOT_WRITE = "worker.slot-write"  # worker: a block of the batch was allocated, the next one is requested
    WORKER_COLLATED = "worker.collated"  # worker: the batch was collated, not encoded
    WORKER_BEFORE_COMMIT = "worker.before-commit"  # worker: the batch was encoded, but may not be in a single slot
    WORKER_AFTER_COMMIT = "worker.after-commit"  # worker: the batch or failure is final, but wasn't sent
    WORKER_NOTIFIED = "worker.notified"  # worker: the trainer was notified
    WORKER_STOP = "worker.stop"  # worker: the trainer closed the channel, and the worker is about to end

    TEMPLATE_BOOT = "template.boot"  # template: the interpreter has started, nothing was received
    TEMPLATE_SET_UP = "template.set-up"  # template: the payload was received, the dataset wasn't built
    TEMPLATE_BUILT = "template.built"  # template: the dataset was built, the trainer wasn't notified
    TEMPLATE_FORK_REQUESTED = "template.fork-requested"  # template: a worker was requested, but not forked
    TEMPLATE_FORKED = "template.forked"  # template: the worker was forked, the trainer wasn't notified
    TEMPLATE_REAPED = "template.reaped"  # template: a worker was reaped, the trainer wasn't notified
    TEMPLATE_STOP = "template.stop"  # template: the trainer closed the channel, and the template is about to end

    GETITEM = "getitem"  # where a test's dataset calls it; the library doesn't


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


@dataclass(frozen=True, slots=True)
class FailpointSpec:
    """One item of the variable."""

    point: Failpoint
    action: Action
    hit: int | None = None
    """Fire only the n-th time that this process reaches the point; n ≥ 1."""
    serial: int | None = None
    """Fire only in the process with this serial number."""
    p: float | None = None
    """Fire only with this probability, in (0, 1]."""
    seed: int = 0
    """Seed of the draws for `p`. The draws differ from process to process, and are the same in each run."""
    once: str | None = None
    """Path of a file that doesn't exist. The process that creates it fires, so the item fires once in the run."""


def parse_failpoints(text: str) -> list[FailpointSpec]:
    """Return the items of the variable's value.

    Raises:
        ValueError: An item is malformed; the message names the item and the rule.
    """
    specs = []
    for item in filter(None, (part.strip() for part in text.split(";"))):
        try:
            specs.append(_parse_item(item))
        except ValueError as error:
            raise ValueError(f"{VARIABLE}: item {item!r}: {error}") from None
    return specs


def _parse_item(item: str) -> FailpointSpec:
    parts = [part.strip().partition("=") for part in item.split(",")]
    (point, _, action), *conditions = parts
    given: dict[str, str] = {}
    for name, _, value in conditions:
        if name not in _CONDITIONS:
            raise ValueError(f"condition {name!r} is unknown; use one of {', '.join(_CONDITIONS)}")
        if name in given:
            raise ValueError(f"condition {name!r} is given twice")
        given[name] = value
    if "seed" in given and "p" not in given:
        raise ValueError("condition 'seed' needs condition 'p'")
    values = {name: _CONDITIONS[name](value) for name, value in given.items()}
    return FailpointSpec(Failpoint(_known(point, Failpoint)), Action(_known(action, Action)), **values)  # type: ignore[arg-type]


def _known(value: str, names: type[Enum]) -> str:
    allowed = [member.value for member in names]
    if value not in allowed:
        raise ValueError(f"{names.__name__.lower()} {value!r} is unknown; use one of {', '.join(allowed)}")
    return value


def _whole(least: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if not (value.isascii() and value.isdigit()) or int(value) < least:
            raise ValueError(f"{value!r} is not an integer of at least {least}")
        return int(value)

    return parse


def _probability(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise ValueError(f"p={value} is out of range; it must be above 0 and at most 1")
    return number


def _path(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError(f"once={value!r} is not an absolute path; use one without ',' and ';'")
    return value


_CONDITIONS: dict[str, Callable[[str], object]] = {
    "hit": _whole(1),
    "serial": _whole(0),
    "p": _probability,
    "seed": _whole(0),
    "once": _path,
}


class _Armed:
    """The items of this process, with their counts. Not thread-safe: templates and workers use it on one thread."""

    def __init__(self, specs: Sequence[FailpointSpec]) -> None:
        self._specs = specs
        self._begin(None)

    def identify(self, serial: int) -> None:
        """Set this process's serial number, and restart its counts and draws."""
        self._begin(serial)

    def reach(self, point: Failpoint) -> None:
        """Fire the items whose conditions hold at this point."""
        if self._serial is None and point.value.startswith(_WORKER_PREFIX):
            return
        # Evaluate all items before the first one fires, because that may raise.
        due = [spec for number, spec in enumerate(self._specs) if spec.point is point and self._is_due(number, spec)]
        for spec in due:
            if spec.once is None or _is_first(spec.once):
                _act(spec)

    def _begin(self, serial: int | None) -> None:
        self._serial = serial
        self._hits = [0] * len(self._specs)
        self._draws = [Random(f"{spec.seed} {number} {serial}") for number, spec in enumerate(self._specs)]  # noqa: S311

    def _is_due(self, number: int, spec: FailpointSpec) -> bool:
        self._hits[number] += 1
        if spec.hit is not None and self._hits[number] != spec.hit:
            return False
        if spec.serial is not None and self._serial != spec.serial:
            return False
        return spec.p is None or self._draws[number].random() < spec.p


def _is_first(marker: str) -> bool:
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    return True


def _act(spec: FailpointSpec) -> None:
    action = spec.action
    if action in (Action.SIGKILL, Action.SIGSEGV, Action.SIGABRT, Action.SIGSTOP):
        signal.raise_signal(signal.Signals[action.value])  # returns after SIGSTOP, when the process is continued
    elif action in (Action.EXIT_0, Action.EXIT_7):
        os._exit(int(action.value.partition("-")[2]))
    elif action is Action.RAISE:
        raise RuntimeError(f"failpoint {spec.point.value}")
    elif action is Action.STOP_ITERATION:
        raise StopIteration(f"failpoint {spec.point.value}")
    else:
        _hang()


def _hang() -> NoReturn:
    while True:
        try:
            signal.pause()
        except BaseException:  # noqa: S112 - a signal handler raised; code that hangs in C wouldn't notice
            continue


def _pass(point: Failpoint) -> None:
    pass


def _stay_anonymous(serial: int) -> None:
    pass


_armed = _Armed(parse_failpoints(os.environ[VARIABLE])) if os.environ.get(VARIABLE) else None

failpoint: Callable[[Failpoint], None] = _pass if _armed is None else _armed.reach
"""Call this at a point where a test may make the process fail."""

identify: Callable[[int], None] = _stay_anonymous if _armed is None else _armed.identify
"""Call this at the start of a worker, with its serial number."""
