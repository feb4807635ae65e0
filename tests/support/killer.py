"""A thread in the trainer that kills workers and templates where it hurts, and only as often as is survived.

Two deaths at the same batch, and too many of one worker id with no batch in between, end the loop by design. The killer
reads the counts of deaths under the engine's locks, and kills no worker that might be the one too many. While the
dispatch lock is held, no worker is given a task; while the engine's lock is held, no answer counts.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from random import Random

from swift_loader import SwiftLoader
from swift_loader.executors.handle import Handle
from swift_loader.executors.process.fleet import TemplateFleet
from swift_loader.sampling.work import key_of
from swift_loader.scheduler.restarts import TEMPLATE

STOPS_IN_SLOT_WRITE = "worker.slot-write=SIGSTOP,p=0.02,seed={seed}"
"""As `faults` has it: some workers stop between two pieces of a batch, and the killer finds them."""

_TICK_S = 0.001
_PAUSE_S = 0.02
_PATIENCE_S = 5.0
"""For an opportunity of one kind; then any worker is killed."""

_OPPORTUNITY_S = 0.02
"""For one to come while the engine's locks are held."""

_SENDING: tuple[str, ...] = {"x86_64": ("44 ", "46 "), "aarch64": ("206 ", "211 ")}.get(os.uname().machine, ("none",))
"""Numbers of sendto(2) and sendmsg(2), as /proc/<pid>/syscall shows them."""


class Aim(Enum):
    """Whom a kill hits."""

    ANYONE = "a worker at a random moment"
    UNREAD = "a worker whose answer is still in its pipe"
    ALL = "all workers at once, each at a batch"
    SLOT_WRITE = "a worker between two pieces of a batch in its slot"
    SENDING = "a worker that is blocked in a send"
    TEMPLATE = "the template, and all workers with it"
    HANG = "a worker that is stopped, until the loader kills it"


class Killer:
    """Carries out some kills, one after another, each after the one before has been dealt with."""

    def __init__(self, loader: SwiftLoader, aims: Sequence[Aim], rng: Random) -> None:
        assert loader._session is not None
        self._engine = loader._session.engine
        self._scheduler = self._engine._scheduler
        fleet = self._engine._executor.fleet  # type: ignore[attr-defined]
        assert isinstance(fleet, TemplateFleet)
        self._fleet = fleet
        self._aims, self._rng = aims, rng
        self._stop = threading.Event()
        self._is_done = threading.Event()
        self._error: BaseException | None = None
        self._struck: set[int] = set()
        """Serial numbers of those that were killed, whether that has been dealt with or not."""
        self._thread = threading.Thread(target=self._run, name="killer")
        self.kills: Counter[Aim] = Counter()
        """How many processes were killed; of a template and its workers, the template counts."""

    @property
    def is_done(self) -> bool:
        """Whether all kills that were asked for have been carried out and dealt with."""
        return self._is_done.is_set()

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        """Raise what went wrong with the killer itself, if anything did."""
        if self._error is not None:
            raise self._error

    # On the killer's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for aim in self._aims:
                self._stop.wait(self._rng.expovariate(1 / _PAUSE_S))
                self._carry_out(aim)
            self._is_done.set()
            while not self._stop.wait(0.005):
                self._continue_stopped()
        except BaseException as error:
            self._error = error
        finally:
            self._is_done.set()
            self._continue_stopped()

    def _carry_out(self, aim: Aim) -> None:
        strike: Callable[[], list[Handle]] = {
            Aim.ANYONE: self._strike_anyone,
            Aim.UNREAD: self._strike_unread,
            Aim.ALL: self._strike_all,
            Aim.SLOT_WRITE: self._strike_slot_write,
            Aim.SENDING: self._strike_sending,
            Aim.TEMPLATE: self._strike_template,
            Aim.HANG: self._strike_by_stopping,
        }[aim]
        deadline_s = time.monotonic() + _PATIENCE_S
        while not self._stop.is_set():
            if aim is not Aim.HANG and time.monotonic() > deadline_s:
                aim, strike = Aim.ANYONE, self._strike_anyone
            victims = strike()
            self._continue_stopped(except_for=victims)
            if victims:
                if self._await_replacement(victims, is_hanging=aim is Aim.HANG):
                    self.kills[aim] += 1 if aim is Aim.TEMPLATE else len(victims)
                return
            self._stop.wait(_TICK_S)

    def _await_replacement(self, victims: list[Handle], *, is_hanging: bool) -> bool:
        """Return whether they were replaced; one that only hangs is let go if nobody waits for it."""
        deadline_s = time.monotonic() + _PATIENCE_S + (self._fleet.options.timeout_s or 0.0)
        while any(victim.serial in self._fleet.workers for victim in victims) or self._num_missing():
            if self._stop.wait(_TICK_S):
                return False
            if is_hanging and time.monotonic() > deadline_s:
                victims, is_hanging = [], False
            self._continue_stopped(except_for=victims)
        return bool(victims)

    def _num_missing(self) -> int:
        return self._fleet.options.num_workers - len(self._fleet.workers)

    def _continue_stopped(self, except_for: Sequence[Handle] = ()) -> None:
        for worker in self._fleet.workers.values():
            if worker not in except_for and _state(worker) == "T":
                self._signal(worker, signal.SIGCONT)

    def _signal(self, worker: Handle, number: signal.Signals) -> None:
        if worker.process.pidfd >= 0:
            worker.process.send_signal(number)

    # Whom to kill; each returns whom it has killed --------------------------------------------------------------------

    @contextmanager
    def _quiet(self) -> Iterator[list[Handle]]:
        """Keep the ledger as it is for a while, and yield the workers that may die, in random order."""
        with self._engine.dispatch_lock, self._engine.lock:
            candidates = [worker for worker in self._fleet.workers.values() if self._may_die(worker)]
            is_settled = not self._num_missing() and not self._scheduler.ledger._lost
            self._rng.shuffle(candidates)
            yield candidates if is_settled else []

    def _may_die(self, worker: Handle) -> bool:
        restarts = self._scheduler._restarts
        is_blamed = any(batch in restarts._by_batch for batch in self._batches_of(worker))
        return not is_blamed and restarts.num_in_a_row(worker.worker_id) <= 1 and not worker.process.has_ended

    def _batches_of(self, worker: Handle) -> list[Hashable]:
        ledger = self._scheduler.ledger
        known = ledger.workers.by_serial.get(worker.serial)
        tasks = known.tasks if known is not None else ()
        return [key_of(task.work) for task in tasks if task.generation == ledger.generation]

    def _kill(self, victims: list[Handle]) -> list[Handle]:
        self._struck.update(victim.serial for victim in victims)
        for victim in victims:
            self._signal(victim, signal.SIGKILL)
        return victims

    def _strike_anyone(self) -> list[Handle]:
        with self._quiet() as candidates:
            return self._kill(candidates[:1])

    def _strike_unread(self) -> list[Handle]:
        with self._quiet() as candidates:
            return self._kill(_first(candidates, _has_unread))

    def _strike_slot_write(self) -> list[Handle]:
        with self._quiet() as candidates:
            return self._kill([worker for worker in candidates if _state(worker) == "T"][:1])

    def _strike_sending(self) -> list[Handle]:
        with self._quiet() as candidates:  # nobody takes in more than one message of each worker meanwhile
            return self._kill(_first(candidates, _is_sending))

    def _strike_all(self) -> list[Handle]:
        with self._quiet() as candidates:
            if len(candidates) < self._fleet.options.num_workers:
                return []
            for worker in candidates:
                self._signal(worker, signal.SIGSTOP)
            for worker in candidates:
                _first([worker], lambda worker: _state(worker) in "TZ")
            # One answer of a worker may be in the receiver's hands already: with two tasks left, one is surely open,
            # and it is held against the worker, not one that the worker gets from another one that has died, too.
            if any(_has_unread(worker) or len(self._batches_of(worker)) < 2 for worker in candidates):
                return []
            return self._kill(candidates)

    def _strike_template(self) -> list[Handle]:
        with self._quiet() as candidates:
            num_in_a_row = self._scheduler._restarts.num_in_a_row(TEMPLATE)
            template = self._fleet.starter.template
            if not candidates or template is None or not self._fleet.starter.are_forkable or num_in_a_row > 1:
                return []
            self._struck.update(self._fleet.workers)
            signal.pidfd_send_signal(template.pidfd, signal.SIGKILL)
            return list(self._fleet.workers.values())

    def _strike_by_stopping(self) -> list[Handle]:
        with self._quiet() as candidates:
            victims = [worker for worker in candidates if self._batches_of(worker)][:1]
            for victim in victims:
                self._signal(victim, signal.SIGSTOP)
            return victims


def _first(workers: list[Handle], is_it: Callable[[Handle], bool]) -> list[Handle]:
    """Return the first worker of which something holds, which it must begin to do soon."""
    deadline_s = time.monotonic() + _OPPORTUNITY_S
    while workers and time.monotonic() < deadline_s:
        for worker in workers:
            if is_it(worker):
                return [worker]
        time.sleep(_TICK_S / 10)  # nobody tells of it
    return []


def _has_unread(worker: Handle) -> bool:
    poll = select.poll()
    poll.register(worker.channel.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _is_sending(worker: Handle) -> bool:
    return _read(worker, "syscall").startswith(_SENDING)


def _state(worker: Handle) -> str:
    return _read(worker, "stat").rpartition(")")[2].strip()[:1] or "Z"


def _read(worker: Handle, name: str) -> str:
    try:
        return Path(f"/proc/{worker.process.pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
