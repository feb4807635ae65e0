"""The passes of a loader: which one is current, where it begins, and what the loop got in it.

An iterator makes one pass. With its first `next` it becomes the current one, and ends the one before it. It refers to
`Passes`, not to the loader, so the loader's public class needs no methods for it.

If a signal handler raises in `next`, the exception comes out of it, and the pass continues with the next batch. If the
handler interrupted something that can't be repeated, the pass ends with a `SwiftLoaderError` instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, NoReturn

from swift_loader.checks import check_integer
from swift_loader.delivery.iterator import LoopIterator, Turn
from swift_loader.errors import SwiftLoaderError, TooManyErrors, warn
from swift_loader.interrupts import is_interrupt
from swift_loader.lifecycle import Lifecycle
from swift_loader.options import Options
from swift_loader.sampling.integers import as_integer, shown
from swift_loader.sampling.plan import MAX_EPOCH, BatchPlan, Plan, PlanReader, SkippedRange
from swift_loader.sampling.run import Run
from swift_loader.scheduler.delivery import Delivery, LeaseState
from swift_loader.scheduler.sample_errors import SampleErrors, SampleFailure, delivered_batch
from swift_loader.session import OpenEpoch, Session
from swift_loader.tuning import Autotuner, first_number

_Delivered = tuple[int, "int | None", tuple[SampleFailure, ...]]
"""A batch that the loop got: how many steps of the epoch are done with it, its step, and its failed samples."""

_NOTHING: _Delivered = (0, None, ())


class Passes:
    """The passes of a loader, one at a time.

    Not thread-safe. The loop's thread uses it: through the loader, or through an iterator whose turn it is.
    """

    def __init__(self, lifecycle: Lifecycle, run: Run, options: Options) -> None:
        """Make it before the first pass, which starts the session. The run's progress counts what the loop gets."""
        self._lifecycle = lifecycle
        self._run = run
        self._in_order = options.delivery.in_order
        self.turn = Turn()
        self.sample_errors = SampleErrors(options.report.max_errors)
        self._current: weakref.ref[EpochIterator] | None = None
        self._last = self._before = _NOTHING
        """The last batch that the loop got, and the one before it."""

    @property
    def has_started(self) -> bool:
        """Whether there is a session. If not, the next pass starts one and so builds the dataset."""
        return self._lifecycle.session is not None

    # For the iterators ------------------------------------------------------------------------------------------------

    def begin(self, iterator: EpochIterator) -> OpenEpoch:
        """Begin the next pass. Any earlier iterator is superseded.

        Raises `SwiftLoaderWarning` if samples of an unfinished pass failed, and the user turns warnings into errors; no
        pass has begun then. Raises `LoaderClosed` if the loader was closed, or what starting the session raised.
        """
        self.warn_of_failures()
        session = self._lifecycle.started_session()
        self.supersede()
        self._current = weakref.ref(iterator)
        opened = session.open_epoch(self._run)
        if session.observer.autotuner is None and self.is_tuned:
            session.observer.autotuner = self._make_autotuner(session)
        self.sample_errors.begin(opened.epoch, session.plan.num_samples(opened.epoch))
        self._last = _NOTHING
        return opened

    def _make_autotuner(self, session: Session) -> Autotuner:
        """Return what chooses the number of workers from now on. The first number follows from the first batch."""
        setup = session.observer.recent(session, 1).setup
        number = first_number(setup, session.dispatcher.fastest_build_s)
        if number != setup.num_workers:
            self._lifecycle.resize(number, is_auto=True)
        return Autotuner(number)

    @property
    def is_tuned(self) -> bool:
        """Whether the loader chooses the number of its workers."""
        return self._lifecycle.options.delivery.is_auto

    def tune(self) -> None:
        """Change the number of workers if that is due. Between two batches."""
        session = self._lifecycle.session
        if session is not None and (number := session.observer.tune(session)) is not None:
            self._lifecycle.resize(number, is_auto=True)

    def note_delivery(self, num_steps: int, step: int, failures: tuple[SampleFailure, ...]) -> None:
        """Record that the loop got the batch of this step, and that `num_steps` steps of the epoch are done."""
        self._before, self._last = self._last, (num_steps, step, failures)
        self._run.progress.advance(num_steps)

    def take_back(self, num_steps: int) -> None:
        """Record that only `num_steps` steps are done: the batch after them, if it was noted, isn't handed out."""
        if self._last[0] > num_steps:
            self._last = self._before
        self._run.progress.advance(num_steps)

    def note_failure(self, error: BaseException) -> None:
        """End the session because of an error that is of no batch."""
        self._lifecycle.fail(error)

    def end(self) -> None:
        """Record that the loop reached the end of the epoch. Issue the warnings of the pass."""
        self._run.progress.end()
        if self._lifecycle.session is not None:
            self._lifecycle.session.end_pass()
        self.warn_of_failures()

    def warn_of_failures(self) -> None:
        """Warn once about the failed samples of the pass, if there are any.

        Raises `SwiftLoaderWarning` if the user's warning filter turns warnings into errors.
        """
        if (summary := self.sample_errors.take_summary()) is not None:
            warn(summary)

    # For the loader ---------------------------------------------------------------------------------------------------

    def supersede(self) -> None:
        """End the current pass. Its iterator raises at its next batch."""
        current = self._current() if self._current is not None else None
        if current is not None:
            current.supersede()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, see `SwiftLoader.set_epoch`."""
        self._run.progress.choose_epoch(check_integer("epoch", epoch, 0, MAX_EPOCH))

    def skip(self, steps: int | Iterable[int], epoch: int | None) -> None:
        """Leave steps out, see `SwiftLoader.skip`."""
        self._lifecycle.check_open()
        progress, (plan, present) = self._run.progress, self.next_plan()
        current = self._current() if self._current is not None else None
        is_running = current is not None and current.is_active
        epoch = check_integer("epoch", present if epoch is None else epoch, 0, MAX_EPOCH)
        if not self._in_order and is_running and epoch == progress.pass_position.epoch:
            raise RuntimeError(
                f"steps of epoch {epoch} can't be skipped in the middle of it with in_order=False: batches arrive as "
                f"they get ready, so no position says which ones are left. Skip them before the pass begins"
            )
        self._run.skip([_range_of(plan, epoch, step) for step in _each_step(steps)], plan.order.num_samples)
        self._lifecycle.note_skip(plan)
        session = self._lifecycle.session
        if current is not None and current.is_active and session is not None:
            if self._in_order:  # else it continues as it is: the skips are of later epochs
                current.reopen(session.reopen_epoch(self._run))
        elif session is not None:
            session.seek(self._run)

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's position, see `SwiftLoader.state_dict`."""
        if not self._in_order and self._run.progress.is_partly_delivered:
            raise RuntimeError(
                "state_dict() doesn't work in the middle of an epoch with in_order=False: batches arrive as they get "
                "ready, so no position says which ones are left. Call it at the end of an epoch, or give in_order=True"
            )
        return self._run.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass resume at a saved position, see `SwiftLoader.load_state_dict`."""
        self._lifecycle.check_open()
        self._run.load_state_dict(state)
        self._last = _NOTHING
        self.supersede()
        if self._lifecycle.session is not None:
            self._lifecycle.session.seek(self._run)

    def next_plan(self) -> tuple[Plan, int]:
        """Return the plan and the epoch of the current pass; between passes, those of the next one."""
        num_samples, progress = self._lifecycle.num_samples(), self._run.progress
        settings = self._lifecycle.plan_settings()
        if progress.is_in_pass:
            return Plan.of(num_samples, settings), progress.position.epoch
        begin = progress.next_begin(num_samples)
        return Plan.of(num_samples, settings.resumed_at(begin)[0]), begin.epoch

    def num_batches(self) -> int:
        """Return the batches of the current pass's epoch; between passes, those of the next one's."""
        plan, epoch = self.next_plan()
        return plan.num_batches(epoch)

    def last_batch(self) -> BatchPlan | None:
        """Return the indices and the padding of the batch that the loop got last; None before the first."""
        _, step, failures = self._last
        return None if step is None else delivered_batch(self._run.progress.batch(step), failures)


class IteratorState(Enum):
    """FRESH ─first next─► ACTIVE ─► DONE or FAILED, or SUPERSEDED by an iterator that began later."""

    FRESH = "fresh"
    ACTIVE = "active"
    DONE = "done"
    FAILED = "failed"
    SUPERSEDED = "superseded"


class EpochIterator(LoopIterator):
    """Iterates over one epoch, which the first `next` chooses. An iterator that is never used costs nothing.

    Errors are permanent: after one, each `next` raises it again. The same holds for the end of the epoch.
    """

    def __init__(self, passes: Passes) -> None:
        super().__init__(passes.turn)
        self._passes = passes
        self._state = IteratorState.FRESH
        self._open: OpenEpoch | None = None
        self._num_steps = 0
        """Steps of the epoch that are done, including those before the pass."""
        self._error: BaseException | None = None
        self._is_tuned = passes.is_tuned

    def _advance(self) -> Delivery:
        if self._state is not IteratorState.ACTIVE:
            self._begin()
        passes, opened = self._passes, self._open
        assert opened is not None
        if opened.owner is not None and opened.owner.pid != self._turn.pid:
            opened.owner.check()
        if self._num_steps >= opened.num_batches:
            self._state = IteratorState.DONE
            passes.end()
            raise StopIteration
        delivery = self._taken
        if delivery is None:
            if self._is_tuned:
                passes.tune()
            delivery = opened.take()
            if delivery.error is not None or delivery.num_before != self._num_steps - opened.offset:
                self._fail_at(delivery, opened)
            self._taken = delivery
        if self._state is not IteratorState.ACTIVE:  # another thread called load_state_dict() while this one waited
            self._check_usable()
        work = delivery.work
        assert work is not None
        if delivery.failures:
            self._note_failures(delivery.failures)
        if delivery.lease is not None:
            delivery.lease.state = LeaseState.KEPT
        self._num_steps += 1
        passes.note_delivery(self._num_steps, work.step, delivery.failures)
        return delivery

    def _take_back(self, delivery: Delivery | None, error: BaseException) -> None:  # noqa: ARG002
        self._taken = taken = delivery or self._taken
        if taken is not None and taken.num_before is not None and self._open is not None and self.is_active:
            self._num_steps = taken.num_before + self._open.offset
            self._passes.take_back(self._num_steps)

    def _note_failures(self, failures: tuple[SampleFailure, ...]) -> None:
        try:
            self._passes.sample_errors.note(failures)
        except TooManyErrors as error:
            self._fail(error)

    def _begin(self) -> None:
        """Begin the pass if it is fresh, or raise why it gives no batches."""
        if self._state is not IteratorState.FRESH:
            self._check_usable()
        had_started = self._passes.has_started
        try:
            opened = self._passes.begin(self)
        except Exception as error:
            # Our own errors and those of the dataset's constructor. Any other error comes from a signal handler, or
            # from the user's warning filter: then this iterator stays fresh.
            if is_interrupt(error) or (had_started and not isinstance(error, SwiftLoaderError)):
                raise
            self._fail(error)
        self._open, self._num_steps = opened, opened.first_step
        self._state = IteratorState.ACTIVE

    def _fail_at(self, delivery: Delivery, opened: OpenEpoch) -> NoReturn:
        """End the pass because of what came in a batch's place."""
        if delivery.error is None:
            self._fail(
                SwiftLoaderError(
                    f"batch {self._num_steps} of epoch {opened.epoch} is lost because a signal handler raised an "
                    f"exception that interrupted the loop while it took the batch. Start a new pass"
                )
            )
        if delivery.work is None:  # there are no more batches
            self._passes.note_failure(delivery.error)
        self._fail(delivery.error)

    def __len__(self) -> int:
        """Batches that are still to come, including all of them before the first `next`."""
        total = self._passes.num_batches() if self._open is None else self._open.num_batches
        return total - self._num_steps

    @property
    def is_active(self) -> bool:
        """Whether the pass has begun and may give more batches."""
        return self._state is IteratorState.ACTIVE

    def reopen(self, opened: OpenEpoch) -> None:
        """Continue with another rest of the same epoch, because some of its steps are skipped now."""
        self._open, self._taken = opened, None

    def supersede(self) -> None:
        """End this pass because a newer one has begun."""
        if self._state is IteratorState.ACTIVE:
            self._state = IteratorState.SUPERSEDED

    def _check_usable(self) -> None:
        """Raise if this pass is over, was superseded or has failed."""
        if self._state is IteratorState.DONE:
            raise StopIteration
        if self._state is IteratorState.SUPERSEDED:
            raise RuntimeError(
                "this iterator can't continue: it was superseded by a newer one of the same loader, or by "
                "load_state_dict() or a new collate_fn. Finish one pass before the next, or make a second loader"
            )
        if self._error is not None:
            raise self._error

    def _fail(self, error: BaseException) -> NoReturn:
        """End the pass: raise this error, now and from each later `next`."""
        if isinstance(error, StopIteration):  # from the user's code: a collate function, a decoder, a constructor
            stop, error = error, RuntimeError("the user's code raised StopIteration, which would end the epoch early")
            error.__cause__ = stop
        self._state = IteratorState.FAILED
        self._error = error
        self._open = self._taken = None
        raise error

    def __repr__(self) -> str:
        where = f" epoch {self._open.epoch}, {self._num_steps} of {self._open.num_batches}" if self._open else ""
        return f"<EpochIterator {self._state.value}{where}>"


def _each_step(steps: Any) -> Iterable[Any]:
    if as_integer(steps) is not None:
        return [steps]
    if not isinstance(steps, Iterable):
        raise TypeError(f"steps={steps!r} is a {type(steps).__name__}; it must be an integer, or several of them")
    return steps


def _range_of(plan: Plan, epoch: int, step: Any) -> SkippedRange:
    number = check_integer("step", step, 0)
    try:
        found = plan.range_of(epoch, number)
    except IndexError as error:
        raise ValueError(f"step {shown(number)} can't be skipped: {error}; steps count from 0") from error
    if not plan.has_whole_steps_in(found):
        raise ValueError(
            f"step {number} of epoch {epoch} can't be skipped: a part of that epoch was delivered or skipped with "
            f"another batch_size or nb_consumer, so its batches begin elsewhere. Load the state into a loader with "
            f"these numbers, skip there, and load the state_dict() of that loader here"
        )
    return found


class EpochSampler:
    """Iterates over the dataset indices that this rank gets in the next epoch, like a torch sampler.

    Frameworks expect a loader to have a sampler with `set_epoch`.
    """

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, as `SwiftLoader.set_epoch` does."""
        self._passes.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        plan, epoch = self._passes.next_plan()
        reader = PlanReader(plan)
        for step in range(plan.num_batches(epoch)):
            yield from reader.batch(epoch, step).indices.tolist()

    def __len__(self) -> int:
        plan, epoch = self._passes.next_plan()
        return plan.num_samples(epoch)

    def __repr__(self) -> str:
        return "<EpochSampler of a SwiftLoader>"
