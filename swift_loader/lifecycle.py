"""A loader from its making to `close()`: how it starts, its passes, and what the loop got in them.

The loader, its iterators and its samplers refer to one `Lifecycle`. Once none of them is left, the session is closed.

An iterator makes one pass. With its first `next` it becomes the current one, and ends the one before it.

If a signal handler raises in `next`, the exception comes out of it, and the pass continues with the batch that the loop
hasn't got.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from typing import Any, NoReturn

from swift_loader.checks import check_integer
from swift_loader.device.move import Target, find_target
from swift_loader.engine.iterator import IteratorState, LoopIterator, ShownIterator, Turn
from swift_loader.engine.session import PassSource, Session
from swift_loader.errors import DatasetMismatch, LoaderClosed, SwiftLoaderError, TooManyErrors, WorkerStalled, warn
from swift_loader.executors.broadcast import START, Broadcast
from swift_loader.executors.fleet import Fleet
from swift_loader.executors.inline import dataset_of
from swift_loader.executors.processes import make_fleet, warm_up
from swift_loader.integrations import ask_framework
from swift_loader.options import Options
from swift_loader.ranks.agreement import SameData, agree_on_length, agree_on_run, report_failure
from swift_loader.ranks.ranks import RankChoice, Ranks, expected_ranks, file_number
from swift_loader.report.report import plain_length
from swift_loader.report.tuning import Autotuner, first_number
from swift_loader.runtime import is_interrupt, run_finalizer
from swift_loader.sampling.integers import as_integer, shown
from swift_loader.sampling.plan import MAX_EPOCH, BatchPlan, Plan, PlanReader, PlanSettings
from swift_loader.sampling.run import PassState, Run
from swift_loader.sampling.skips import Position, SkippedRange
from swift_loader.sampling.work import PlannedSource
from swift_loader.scheduler.delivery import Delivery
from swift_loader.scheduler.sample_errors import SampleErrors, delivered_batch
from swift_loader.worker.seeding import Rng
from swift_loader.worker.spec import WorkerSpec, length_of
from swift_loader.worker.torch_worker import epoch_of


class LoaderState(Enum):
    """NEW ─start─► STARTING ─► STARTED ─► CLOSED. If starting fails, the loader is NEW again. `close` works in each."""

    NEW = "not started"
    STARTING = "starting"
    STARTED = "started"
    CLOSED = "closed"


class Lifecycle:
    """What a loader does, apart from its public names.

    Any thread may call `close` and `resize`. The others belong to the loop's thread: through the loader, or through an
    iterator whose turn it is.
    """

    def __init__(self, options: Options, run: Run, dataset: Any = None) -> None:
        """Start nothing. `run`: what the session continues. `dataset`: in this process, if it is built already."""
        self.options = options
        """`resize` replaces them."""
        self._resizing = threading.RLock()
        """Held while it does, and as `start` begins. Reentrant, as a signal handler may resize."""
        self.run = run
        self.dataset: Any = options.workers.dataset if dataset is None else dataset
        """The dataset in this process; None if it isn't built here."""
        self.state = LoaderState.NEW
        self._fleet: Fleet | None = None
        """Builds the dataset in other processes, until the session owns it."""
        self.session: Session | None = None
        """The started session. It stays after `close`."""
        self._closing: weakref.finalize[..., Any] | None = None
        """Closes the fleet, or the session that owns it by now."""
        self._failure: BaseException | None = None
        """Why the session was closed. Each later pass raises it."""
        self._skips_world_size: int | None = None
        """The number of ranks whose steps the user skipped before `start`; None: none were."""
        self.turn = Turn()
        self._dataset_epoch = epoch_of(self.dataset)
        """What the dataset's `set_epoch` was called with last, as far as is known here."""
        self.sample_errors = SampleErrors(options.report.max_errors)
        self._current: weakref.ref[EpochIterator] | None = None
        delivery = options.delivery
        if delivery.num_workers if delivery.executor is None else delivery.num_local:
            warm_up(options.workers.start_method, options.workers.modules)

    def check_open(self, text: str = "the loader was closed; make a new one") -> None:
        """Raise `LoaderClosed` with this text if the loader was closed."""
        if self.state is LoaderState.CLOSED:
            raise LoaderClosed(text)

    # Where the dataset is built ---------------------------------------------------------------------------------------

    def built_dataset(self) -> Any:
        """Return the dataset in this process. Build it if it isn't built here yet."""
        if self.dataset is None:
            self.dataset = dataset_of(self.options.workers)
        return self.dataset

    def prepare(self) -> None:
        """Begin to build the dataset in a template, see `SwiftLoader.prepare`."""
        self.check_open()
        if self.state is not LoaderState.NEW or self._fleet is not None or not self.options.delivery.uses_processes:
            return
        fleet = self._make_fleet(self.plan_settings())
        try:
            fleet.start_first()
        except BaseException:
            self._release()
            raise

    def num_samples(self) -> int:
        """Return the dataset's length. Before `start` this may start a process that builds the dataset."""
        if self.run.num_samples is None:
            self.run.note_length(self._measured_dataset())
        assert self.run.num_samples is not None
        return self.run.num_samples

    def _measured_dataset(self) -> int:
        if self.dataset is not None or not self.options.delivery.uses_processes:
            return length_of(self.built_dataset())
        fleet = self._fleet
        if fleet is None or not fleet.owner.is_here():
            fleet = self._make_fleet(self.plan_settings())
        try:
            return fleet.wait_built()[0]
        except BaseException:
            self._release()
            raise

    def _fleet_for(self, plan: PlanSettings) -> Fleet | None:
        """Return the fleet that is there already, if this plan can use it; else a new one. None without processes."""
        if not self.options.delivery.uses_processes:
            return None
        fleet = self._fleet
        if fleet is not None and fleet.owner.is_here():
            seeds_by_plan = self.options.workers.rng is Rng.WORKER
            if (fleet.spec.plan == plan or not seeds_by_plan) and fleet.is_current():
                return fleet
        self._release()
        return self._make_fleet(plan)

    def _make_fleet(self, plan: PlanSettings) -> Fleet:
        self._fleet = fleet = make_fleet(WorkerSpec(self.options.workers, plan), self.options.delivery)
        self._own(fleet)
        return fleet

    def _own(self, owned: Fleet | Session) -> None:
        """Close this in the end. It owns what was to be closed before."""
        before, self._closing = self._closing, weakref.finalize(self, owned.close)
        if before is not None:
            before.detach()

    # Starting ---------------------------------------------------------------------------------------------------------

    def start(self, choice: RankChoice, target: Target | None) -> None:
        """Start the session of one rank, see `SwiftLoader.start`. `target` None leaves batches as they are."""
        with self._resizing:  # another thread may be changing the number of workers that are to be started
            self.check_open()
            if self.state is not LoaderState.NEW:
                raise RuntimeError("the loader runs already; call start() at most once, before the first iteration")
            self.state = LoaderState.STARTING
        try:
            ranks = choice.find(self.options.sampling.world_size)
            self._check_skips(ranks)
            group = agree_on_run(
                self.run,
                ranks,
                self.options.facts(),
                is_made_here=self.options.maker.is_here(),
                shares_batches=self._may_share(ranks, wanted=choice.share_batches),
            )
            self.session = self._start_session(ranks, target, group)
        finally:
            self._end_start()

    def _may_share(self, ranks: Ranks, *, wanted: bool) -> bool:
        """Return whether this rank shares batches with those that need the same data, if there are any."""
        if ranks.processes is None or len(ranks.processes) <= ranks.world_size or not wanted:
            return False
        if not self.options.delivery.in_order:
            raise ValueError(
                "ranks that need the same data share batches, which works in order only, but in_order=False; give "
                "in_order=True, or start(share_batches=False)"
            )
        return True

    def _start_session(self, ranks: Ranks, target: Target | None, group: SameData | None) -> Session:
        """Return a session that runs, with a dataset of the same length on all ranks."""
        options, delivery = self.options, self.options.delivery
        broadcast = None
        try:
            if group is not None:
                broadcast = Broadcast(
                    group.store, group.ranks, group.rank, delivery.timeout_s, delivery.stall_warning_s
                )
            plan = replace(options.sampling.plan_settings(self.run.order, ranks), skips=self.run.skips)
            delivery.warn_of_idle_workers()
            if broadcast is not None and not broadcast.is_leader:
                self._release()
                dataset = fleet = None
            else:
                dataset = None if delivery.uses_processes else self.built_dataset()
                fleet = self._fleet_for(plan)
            number = file_number(ranks)
            session = Session(
                options, self.run, plan, target, file_number=number, dataset=dataset, fleet=fleet, broadcast=broadcast
            )
            self._own(session)  # another thread may close it while it starts
            self._fleet = None
            self.check_open("the loader was closed while it started")
            session.start()
        except BaseException as error:
            if broadcast is not None and broadcast.is_leader and isinstance(error, Exception):
                with suppress(SwiftLoaderError):  # this rank's own error matters more
                    broadcast.send(START, error)
            self._release()
            if broadcast is not None:
                broadcast.close()
            report_failure(ranks, error)
            raise
        try:
            agree_on_length(ranks, session.engine.num_samples)
            self.run.note_length(session.engine.num_samples)  # raises on all ranks, or on none
        except BaseException:
            self._release()
            raise
        return session

    def _end_start(self) -> None:
        """Leave the state STARTING, unless another thread has called `close` meanwhile."""
        reached = LoaderState.NEW if self.session is None else LoaderState.STARTED
        # No other thread and no signal handler can run between the next two lines.
        if self.state is LoaderState.STARTING:
            self.state = reached
        elif self.session is not None:
            self.close()
            self.check_open("the loader was closed while it started")

    def started_session(self) -> Session:
        """Return the session. Start it if that wasn't done."""
        self.check_open()
        if self._failure is not None:
            raise self._failure
        if self.session is None:
            self.start(RankChoice(), find_target(None, None, None, pin_memory=self.options.delivery.pin_memory))
        assert self.session is not None
        return self.session

    def plan_settings(self) -> PlanSettings:
        """Return the settings of this rank's plan; before `start`, as far as they are known."""
        sampling = self.options.sampling
        if self.session is not None:
            settings = self.session.settings
        else:
            settings = sampling.plan_settings(self.run.order, expected_ranks(sampling.world_size))
        return replace(settings, skips=self.run.skips)

    def _check_skips(self, ranks: Ranks) -> None:
        """Raise if steps were skipped that are others with these ranks."""
        expected = self._skips_world_size
        if expected not in (None, ranks.world_size):
            raise ValueError(
                f"skip() was called before start(), when there seemed to be {expected} rank(s), but {ranks.source} "
                f"says that there are {ranks.world_size}, whose steps have other samples. Make a new loader, and call "
                f"skip() after start()"
            )

    def resize(self, num_workers: int, *, is_auto: bool = False) -> None:
        """Change the number of workers, see `SwiftLoader.resize`. Any thread.

        `is_auto`: the loader changes it by itself. What the user chooses stays.
        """
        self.check_open()
        with self._resizing:
            if is_auto and not self.options.delivery.is_auto:  # the user has just chosen a number
                return
            options = self.options.resized(num_workers, is_auto=is_auto)
            if not self.options.delivery.num_workers:
                raise RuntimeError(
                    f"resize({num_workers}) needs a loader with workers, and worker_per_consumer=0 builds batches in "
                    f"the calling thread. Make the loader with worker_per_consumer=1 or more"
                )
            if self.state is LoaderState.STARTING:
                raise RuntimeError("the loader is starting; call resize() before start(), or once it has returned")
            if self.session is not None:
                self.session.resize(options)
            elif self._fleet is not None:
                self._fleet.resize(options.delivery.num_workers, options.delivery.limits)
            self.options = options
        if self.session is not None:
            options.delivery.warn_of_idle_workers()

    # Passes -----------------------------------------------------------------------------------------------------------

    def begin_pass(self, iterator: EpochIterator) -> PassSource:
        """Begin the next pass. Any earlier iterator is superseded. Return the same as `Session.begin_pass`.

        Raises `SwiftLoaderWarning` if samples of an unfinished pass failed, and the user turns warnings into errors; no
        pass has begun then. Raises `LoaderClosed` if the loader was closed, or what starting the session raised.
        """
        self.sample_errors.warn()
        session = self.started_session()
        given = self.options.workers.dataset
        if given is not None and (length := length_of(given)) != (before := session.engine.num_samples):
            raise DatasetMismatch(
                f"the dataset has {length:,} samples now, but had {before:,} when the loader started; make a new "
                f"loader, as workers don't see the change"
            )
        self.supersede()
        self._current = weakref.ref(iterator)
        source, this = session.begin_pass(), self.run.this
        assert this is not None, "it has begun"
        if session.observer.autotuner is None and self.options.delivery.is_auto:
            setup = session.observer.recent(session, 1).setup
            number = first_number(setup, session.engine.fastest_build_s)  # it follows from the first batch
            if number != setup.num_workers:
                self.resize(number, is_auto=True)
            session.observer.autotuner = Autotuner(number)
        self.sample_errors.begin(this.begin.epoch, this.plan.num_samples(this.begin.epoch))
        before_epoch, self._dataset_epoch = self._dataset_epoch, epoch_of(given)
        if self._dataset_epoch != before_epoch and self.options.delivery.uses_processes:
            warn(
                "the dataset's set_epoch was called since the loader started, but worker processes have copies of the "
                "dataset, and don't see that. Let samples depend on sample_rng(), which differs in each epoch; or make "
                "a new loader for each epoch; or use threads, or DataLoader"
            )
        return source

    def fail(self, error: BaseException) -> None:
        """Close the session because there are no more batches.

        The session keeps the error, whose traceback refers to the loop and so to this object. As long as the session
        waits for this object's end, neither would end. After a stall, the loop may wait again.
        """
        if isinstance(error, (WorkerStalled, LoaderClosed)) or self.session is None:
            return
        if self._closing is not None:
            self._failure = error
            run_finalizer(self._closing)

    def supersede(self) -> None:
        """End the current pass. Its iterator raises at its next batch."""
        current = self._current() if self._current is not None else None
        if current is not None:
            current.supersede()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, see `SwiftLoader.set_epoch`."""
        self.run.choose(check_integer("epoch", epoch, 0, MAX_EPOCH))

    def skip(self, steps: int | Iterable[int], epoch: int | None) -> None:
        """Leave steps out, see `SwiftLoader.skip`."""
        self.check_open()
        plan, present = self.next_plan()
        epoch = check_integer("epoch", present if epoch is None else epoch, 0, MAX_EPOCH)
        if (running := self._running_pass()) is not None and epoch == running.begin.epoch:
            self._check_in_order(f"steps of epoch {epoch} can't be skipped in the middle of it")
        ranges = [_range_of(plan, epoch, step) for step in _each_step(steps)]
        self._change(lambda: self.run.skip(ranges, plan.order.num_samples))
        if self.session is None:  # they are steps of the expected ranks
            self._skips_world_size = plan.settings.world_size

    def exclude(self, rows: Any) -> None:
        """Leave rows out from the loop's position on, see `SwiftLoader.exclude`."""
        num_samples, since = self._present("rows can't be excluded in the middle of an epoch")
        self._change(lambda: self.run.exclude(rows, num_samples, since))

    def reweight(self, weights: Any) -> None:
        """Change a mixture's weights from the loop's position on, see `SwiftLoader.reweight`."""
        num_samples, since = self._present("weights can't change in the middle of an epoch")
        self._change(lambda: self.run.reweight(weights, num_samples, since))

    def _present(self, what: str) -> tuple[int, Position | None]:
        """Return the dataset's length, and where the loop is in a pass; None if none runs. `what` needs the order."""
        self.check_open()
        num_samples, since = self.num_samples(), None
        if (running := self._running_pass()) is not None:
            self._check_in_order(what)
            since = Position(running.begin.epoch, running.position.num_samples)
        return num_samples, since

    def _running_pass(self) -> PlannedSource | None:
        current = self._current() if self._current is not None else None
        return self.run.this if current is not None and current.is_active else None

    def _check_in_order(self, what: str) -> None:
        if not self.options.delivery.in_order:
            raise RuntimeError(
                f"{what} with in_order=False: batches arrive as they get ready, so no position says which ones are "
                f"left. Do it between two epochs, or give in_order=True"
            )

    def _change(self, change: Callable[[], None]) -> None:
        """Change what the run leaves out, or its order. The pass that runs continues so."""
        current, before = self._current() if self._current is not None else None, (self.run.skips, self.run.order)
        try:
            change()
            if self.session is None:
                return
            if current is None or not current.is_active or self.run.last.state is PassState.OVER:
                self.session.seek()
            elif self.options.delivery.in_order:  # else it continues as it is: only later epochs change
                current.reopen()
        except BaseException:
            is_changed = (self.run.skips, self.run.order) != before
            if current is not None and is_changed:  # the plan may be another than the pass counts by
                current.supersede()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's position, see `SwiftLoader.state_dict`."""
        if not self.options.delivery.in_order and self.run.is_partly_delivered:
            self._check_in_order("state_dict() doesn't work in the middle of an epoch")
        return self.run.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass resume at a saved position, see `SwiftLoader.load_state_dict`."""
        self.check_open()
        if isinstance(state, Mapping) and not state:
            return
        self.run.load_state_dict(state)
        self.supersede()
        if self.session is not None:
            self.session.seek()

    def next_plan(self, num_samples: int | None = None) -> tuple[Plan, int]:
        """Return the plan and the epoch of the current pass; between passes, those of the next one."""
        num_samples = self.num_samples() if num_samples is None else num_samples
        plan = Plan.of(num_samples, self.plan_settings())
        if self.run.is_in_pass:
            return plan, self.run.position.epoch
        begin = self.run.next_begin(num_samples)
        return plan.resumed_at(begin)[0], begin.epoch

    def num_batches(self, num_samples: int | None = None) -> int:
        """Return the batches of the current pass's epoch; between passes, those of the next one's."""
        plan, epoch = self.next_plan(num_samples)
        return plan.num_batches(epoch)

    def last_batch(self) -> BatchPlan | None:
        """Return the indices and the padding of the batch that the loop got last; None before the first."""
        this = None if self.run.this is None else self.run.this.present()
        if this is None or this.last is None:
            return None
        step, failures = this.last
        return delivered_batch(this.plan.batch(this.begin.epoch, step), failures)

    def describe(self) -> tuple[list[int | None], str, str]:
        """Return the sizes, the state and the place, for `DeliveryOptions.describe`."""
        run, this, position, session = self.run, self.run.this, self.run.position, self.session
        num_batches, num_samples = None, plain_length(self.dataset) if run.num_samples is None else run.num_samples
        if num_samples and run.fits(num_samples):
            num_batches = self.num_batches(num_samples)
        state, where = self.state.value, f"epoch {position.epoch}"
        if self.state is LoaderState.STARTED:
            state = "failed" if self._failure is not None else "running" if run.is_in_pass else state
        if session is not None and session.settings.world_size > 1:
            state = f"rank {session.settings.rank} of {session.settings.world_size} ranks, {state}"
        if this is not None and this.begin.epoch == position.epoch:
            where += f", batch {len(this.steps):,}"
        elif position.num_samples:
            where += f", sample {position.num_samples:,}"
        return [num_samples, num_batches, self.options.sampling.batch_size], state, where

    # Closing ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop all processes and threads, and issue the last warnings. Idempotent and thread-safe."""
        self.state = LoaderState.CLOSED
        self._release()
        if self.session is not None:
            self.session.engine.issue_warnings()

    def _release(self) -> None:
        """Close what exists: the fleet, or the session, which may be starting. Idempotent."""
        self._fleet = None
        if self._closing is not None:
            run_finalizer(self._closing)


class EpochIterator(LoopIterator):
    """Iterates over one epoch, which the first `next` chooses. An iterator that is never used costs nothing.

    Errors are permanent: after one, each `next` raises it again. The same holds for the end of the epoch.
    """

    _progress: PlannedSource

    def __init__(self, lifecycle: Lifecycle) -> None:
        super().__init__(lifecycle.turn)
        self._lifecycle = lifecycle
        self._session: Session
        """Known once it has begun."""
        self._source: PassSource | None = None
        """None until it has begun."""
        self._is_tuned = lifecycle.options.delivery.is_auto

    def _begin(self) -> None:
        lifecycle, before = self._lifecycle, self._lifecycle.run.this
        had_started = lifecycle.session is not None
        try:
            self._source = lifecycle.begin_pass(self)
        except Exception as error:
            # Our own errors and those of the dataset's constructor. Any other error comes from a signal handler, or
            # from the user's warning filter: then this iterator stays fresh, or continues.
            if is_interrupt(error) or (had_started and not isinstance(error, SwiftLoaderError)):
                raise
            self._fail(error)
        finally:
            this, session = lifecycle.run.this, lifecycle.session
            if this is not None and this is not before and self._state is IteratorState.FRESH:  # the pass has begun
                assert session is not None, "it has begun"
                self._session, self._engine, self._progress = session, session.engine, this
                self._owner = session.engine.owner
                self._is_dirty = self._source is None
                self._state = IteratorState.ACTIVE

    def _seek(self) -> None:
        if not self._progress.has_all:
            self.reopen()

    def _take(self) -> Delivery:
        session, this = self._session, self._progress
        if this.done.first >= this.num_batches:
            return Delivery(is_end=True)
        if self._is_tuned and (number := session.observer.tune(session)) is not None:
            self._lifecycle.resize(number, is_auto=True)
        assert self._source is not None, "it has begun"
        delivery = self._source.take()
        if delivery.failures and delivery.error is None:
            try:
                self._lifecycle.sample_errors.note(delivery.failures)
            except TooManyErrors as error:
                return Delivery(delivery.work, error=error)
        return delivery

    def _give(self, delivery: Delivery) -> NoReturn:
        assert delivery.error is not None
        self._source = None
        if delivery.work is None:  # there are no more batches
            self._lifecycle.fail(delivery.error)
        self._fail(delivery.error)

    def _end(self) -> None:
        self._progress.is_over = True
        self._stop(IteratorState.DONE)
        self._session.end_pass()
        self._lifecycle.sample_errors.warn()

    def __len__(self) -> int:
        """Batches that are still to come, including all of them before the first `next`."""
        if self._state is IteratorState.FRESH:
            return self._lifecycle.num_batches()
        return self._progress.num_batches - len(self._progress.steps)

    @property
    def is_active(self) -> bool:
        """Whether the pass has begun and may give more batches."""
        return self._state is IteratorState.ACTIVE

    def reopen(self) -> None:
        """Continue with the rest of the epoch: after an interrupt, or because some of its steps are skipped now."""
        self._source = self._session.reopen_pass()

    def supersede(self) -> None:
        """End this pass because a newer one has begun. If the loop has all batches, it meets the end."""
        if self._state is IteratorState.ACTIVE and self._progress.has_all:
            self._stop(IteratorState.DONE)
        elif self._state is IteratorState.ACTIVE:
            superseded = (
                "this iterator can't continue: it was superseded by a newer one of the same loader, or by "
                "load_state_dict() or a new collate_fn. Finish one pass before the next, or make a second loader"
            )
            self._stop(IteratorState.SUPERSEDED, RuntimeError(superseded))

    def __repr__(self) -> str:
        where = ""
        if hasattr(self, "_progress"):
            this = self._progress
            where = f", epoch {this.begin.epoch}, batch {len(this.steps):,} of {this.num_batches:,}"
        return f"<EpochIterator: {self._state.value}{where}>"


class ShownEpoch(ShownIterator, EpochIterator):
    """The same with a bar."""

    def _place(self) -> tuple[int, int, int | None, int]:
        if self._state is IteratorState.FRESH:
            self._begin()
        this = self._progress
        return this.begin.epoch, len(this.steps), this.num_batches, this.plan.settings.rank


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

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, as `SwiftLoader.set_epoch` does."""
        self._lifecycle.set_epoch(epoch)
        ask_framework("after_set_epoch", self._lifecycle)

    def __iter__(self) -> Iterator[int]:
        plan, epoch = self._lifecycle.next_plan()
        reader = PlanReader(plan)
        for step in range(plan.num_batches(epoch)):
            yield from reader.batch(epoch, step).indices.tolist()

    def __len__(self) -> int:
        plan, epoch = self._lifecycle.next_plan()
        return plan.num_samples(epoch)
