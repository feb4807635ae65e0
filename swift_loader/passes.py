"""The passes of a loader: which one is current, where it begins, and what the loop got in it.

An iterator makes one pass. With its first `next` it becomes the current one, and ends the one before it. It refers to
this object, not to the loader, so the loader's public class needs no methods for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from swift_loader.checks import check_integer
from swift_loader.errors import warn
from swift_loader.lifecycle import Lifecycle
from swift_loader.options import Options
from swift_loader.sampling.integers import as_integer, shown
from swift_loader.sampling.plan import MAX_EPOCH, BatchPlan, Plan, PlanReader, SkippedRange
from swift_loader.sampling.run import Run
from swift_loader.scheduler.sample_errors import SampleErrors, SampleFailure, delivered_batch
from swift_loader.session import OpenEpoch, Session
from swift_loader.threads import NextLock
from swift_loader.tuning.autotuner import MAX_BATCHES, Autotuner, first_number

if TYPE_CHECKING:
    from swift_loader.iterator import EpochIterator

Delivered = tuple["int | None", tuple[SampleFailure, ...]]
"""A batch that the loop got: its step, or None if there is none yet, and its failed samples."""

NOTHING: Delivered = (None, ())


class Passes:
    """The passes of a loader, one at a time.

    Not thread-safe. The loop's thread uses it: through the loader, or through an iterator whose turn it is.
    """

    def __init__(self, lifecycle: Lifecycle, run: Run, options: Options) -> None:
        """Make it before the first pass, which starts the session. The run's progress counts what the loop gets."""
        self._lifecycle = lifecycle
        self._run = run
        self._in_order = options.delivery.in_order
        self.next_lock = NextLock()
        self.sample_errors = SampleErrors(options.report.max_errors)
        self._current: weakref.ref[EpochIterator] | None = None
        self._last = NOTHING
        self._autotuner: Autotuner | None = None
        """Made by the first pass, if the loader chooses the number of its workers."""

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
        if self._autotuner is None and self._lifecycle.options.delivery.is_auto:
            self._autotuner = self._make_autotuner(session)
        self.sample_errors.begin(opened.epoch, session.plan.num_samples(opened.epoch))
        self._last = NOTHING
        return opened

    def _make_autotuner(self, session: Session) -> Autotuner:
        """Return what chooses the number of workers from now on. The first number follows from the first batch."""
        setup = session.recent_observations(1).setup
        number = first_number(setup, session.dispatcher.fastest_build_s)
        if number != setup.num_workers:
            self._lifecycle.resize(number, is_auto=True)
        return Autotuner(number)

    def tune(self) -> None:
        """Change the number of workers if that is due. Between two batches."""
        autotuner, session = self._autotuner, self._lifecycle.session  # another thread may end the tuning at any time
        if autotuner is not None and session is not None and autotuner.is_due():
            number = autotuner.decide(session.recent_observations(MAX_BATCHES))
            if number is not None:
                self._lifecycle.resize(number, is_auto=True)

    def stop_tuning(self) -> None:
        """Leave the number of workers to the user. Any thread."""
        self._autotuner = None

    @property
    def tuning(self) -> list[str]:
        """What was done about the number of workers, and why. Empty if the user has chosen it."""
        autotuner = self._autotuner
        return [] if autotuner is None else autotuner.describe()

    def note_delivery(self, delivered: Delivered, num_steps: int) -> None:
        """Record that the loop got this batch, and that `num_steps` steps of the epoch are done."""
        self._last = delivered
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
        self._last = NOTHING
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
        step, failures = self._last
        return None if step is None else delivered_batch(self._run.progress.batch(step), failures)


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
