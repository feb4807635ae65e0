"""What a loader does before `start()`; then it starts the session, and closes it.

The loader, its iterators and its samplers refer to this object. Once none of them is left, the session is closed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from swift_loader.device.move import Target, find_target
from swift_loader.errors import LoaderClosed, SwiftLoaderError, WorkerStalled, warn
from swift_loader.executors.broadcast import START, Broadcast
from swift_loader.executors.fleet import Fleet
from swift_loader.executors.inline import dataset_of
from swift_loader.executors.processes import make_fleet, warm_up
from swift_loader.interrupts import run_finalizer
from swift_loader.options import Options
from swift_loader.ranks.agreement import agree_on_length, agree_on_run, report_failure
from swift_loader.ranks.ranks import Ranks, expected_ranks, file_number, find_ranks, ranks_of_job, ranks_of_mesh
from swift_loader.sampling.plan import Plan, PlanSettings
from swift_loader.sampling.run import Run
from swift_loader.session import Session
from swift_loader.worker.seeding import Rng
from swift_loader.worker.spec import WorkerSpec, length_of

if TYPE_CHECKING:
    import torch

    from swift_loader.ranks.agreement import SameData

# What `start()` was told about the rank of this process.


@dataclass(frozen=True, slots=True)
class RankChoice:
    """The arguments of `start()` that say which data this rank gets. The integers are checked."""

    consumer_index: int | None = None
    rank: int | None = None
    """The same as `consumer_index`; only one of them may be given."""
    world_size: int | None = None
    """How many data-parallel ranks there are."""
    mesh: Any = None
    data_dims: Sequence[str] | None = None
    share_batches: bool = True
    """Whether ranks of one node that need the same data load it once."""

    def find(self, nb_consumer: int | None) -> Ranks:
        """Return the rank of this process. `nb_consumer` is the option, or None.

        Raises `TypeError` if two arguments exclude each other, `ValueError` if they contradict each other, the option
        or the launcher, `RuntimeError` if there are several ranks, and nothing says which one this is.
        """
        if self.consumer_index is not None and self.rank is not None:
            raise TypeError("consumer_index and rank are both given; they are one argument, so give rank only")
        rank = self.consumer_index if self.rank is None else self.rank
        if self.mesh is not None:
            if rank is not None or self.world_size is not None:
                raise TypeError("mesh says rank and world_size; give mesh, or rank and world_size, not both")
            return ranks_of_mesh(self.mesh, self.data_dims, nb_consumer)
        if self.data_dims is not None:
            raise TypeError("data_dims names dimensions of a mesh, but there is no mesh; give mesh, too")
        if self.world_size is not None and nb_consumer not in (None, self.world_size):
            raise ValueError(
                f"world_size={self.world_size}, but the loader was made with nb_consumer={nb_consumer}; they are one "
                f"number, so give world_size only"
            )
        if rank is not None and self.world_size is not None:
            return ranks_of_job(rank, self.world_size)
        return find_ranks(rank, nb_consumer if self.world_size is None else self.world_size)


class Preparation:
    """The dataset in this process and the template that builds it in another, each made when something needs it.

    The supervisor belongs to this object until `hand_over`, and is closed with it. Any thread may call `close`.
    """

    def __init__(self, options: Options, dataset: Any = None) -> None:
        self._options = options
        self.dataset: Any = options.workers.dataset if dataset is None else dataset
        """The dataset in this process; None if it isn't built here."""
        self._supervisor: Fleet | None = None
        self._close_supervisor: weakref.finalize[Any, Any] | None = None
        delivery = options.delivery
        num_local = delivery.num_workers if delivery.executor is None else delivery.num_local
        if num_local:
            warm_up(options.workers.start_method, options.workers.modules)

    def use_options(self, options: Options) -> None:
        """Prepare a loader with another number of workers, at least 1."""
        self._options = options
        if self._supervisor is not None:
            self._supervisor.resize(options.delivery.num_workers, options.delivery.limits)

    def built_dataset(self) -> Any:
        """Return the dataset in this process. Build it if it isn't built here yet."""
        if self.dataset is None:
            self.dataset = dataset_of(self._options.workers)
        return self.dataset

    def begin(self, plan: PlanSettings) -> None:
        """Begin to build the dataset in a template, unless that was done. Returns at once."""
        if self._supervisor is not None or not self._options.delivery.uses_processes:
            return
        supervisor = self._make_supervisor(plan)
        try:
            supervisor.start_first()
        except BaseException:
            self.close()
            raise

    def num_samples(self, plan: PlanSettings) -> int:
        """Return the dataset's length. Blocks while a template builds the dataset, if it isn't in this process."""
        if self.dataset is not None or not self._options.delivery.uses_processes:
            return length_of(self.built_dataset())
        supervisor = self._supervisor
        if supervisor is None or not supervisor.owner.is_here():
            supervisor = self._make_supervisor(plan)
        try:
            return supervisor.wait_built()[0]
        except BaseException:
            self.close()
            raise

    def supervisor_for(self, plan: PlanSettings) -> Fleet | None:
        """Return the supervisor that is there already, if this plan can use it; else a new one. None without workers.

        It belongs to this object until `hand_over`.
        """
        if not self._options.delivery.uses_processes:
            return None
        supervisor = self._supervisor
        if supervisor is not None and supervisor.owner.is_here():
            seeds_by_plan = self._options.workers.rng is Rng.WORKER
            if (supervisor.spec.plan == plan or not seeds_by_plan) and supervisor.is_current():
                return supervisor
        self.close()
        return self._make_supervisor(plan)

    def hand_over(self) -> None:
        """Leave the supervisor to the session, which closes it."""
        self._supervisor = None
        if self._close_supervisor is not None:
            self._close_supervisor.detach()

    def close(self) -> None:
        """Close the supervisor, if there is one. Idempotent."""
        self._supervisor = None
        if self._close_supervisor is not None:
            run_finalizer(self._close_supervisor)

    def _make_supervisor(self, plan: PlanSettings) -> Fleet:
        self._supervisor = supervisor = make_fleet(WorkerSpec(self._options.workers, plan), self._options.delivery)
        self._close_supervisor = weakref.finalize(self, supervisor.close)
        return supervisor


class LoaderState(Enum):
    """NEW ─start─► STARTING ─► STARTED ─► CLOSED. If starting fails, the loader is NEW again. `close` works in each."""

    NEW = "not started"
    STARTING = "starting"
    STARTED = "started"
    CLOSED = "closed"


class Lifecycle:
    """A loader from its making to `close()`.

    Any thread may call `close` and `resize`; the others belong to the loop's thread.
    """

    def __init__(self, options: Options, run: Run, dataset: Any = None) -> None:
        """Start nothing. `run`: what the session continues. `dataset`: in this process, if it is built already."""
        self.options = options
        """`resize` replaces them."""
        self._resizing = threading.RLock()
        """Held while it does, and as `start` begins. Reentrant, as a signal handler may resize."""
        self._run = run
        self.preparation = Preparation(options, dataset)
        self.state = LoaderState.NEW
        self.session: Session | None = None
        """The started session. It stays after `close`."""
        self._failure: BaseException | None = None
        """Why the session was closed. Each later pass raises it."""
        self._close_session: weakref.finalize[Any, Any] | None = None
        self._skips_world_size: int | None = None
        """The number of ranks whose steps the user skipped before `start`; None: none were."""

    def check_open(self, text: str = "the loader was closed; make a new one") -> None:
        """Raise `LoaderClosed` with this text if the loader was closed."""
        if self.state is LoaderState.CLOSED:
            raise LoaderClosed(text)

    def prepare(self) -> None:
        """Begin to build the dataset in a template, see `SwiftLoader.prepare`."""
        self.check_open()
        if self.state is LoaderState.NEW:
            self.preparation.begin(self.plan_settings())

    def start(
        self,
        choice: RankChoice | None = None,
        device: torch.device | str | int | None = None,
        to_device: Callable[..., Any] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Start the session of one rank, see `SwiftLoader.start`."""
        with self._resizing:  # another thread may be changing the number of workers that are to be started
            self.check_open()
            if self.state is not LoaderState.NEW:
                raise RuntimeError("the loader runs already; call start() at most once, before the first iteration")
            self.state = LoaderState.STARTING
        try:
            choice = choice or RankChoice()
            ranks = choice.find(self.options.sampling.world_size)
            self._check_skips(ranks)
            target = find_target(device, to_device, dtype, pin_memory=self.options.delivery.pin_memory)
            is_made_here = self.options.maker.is_here()
            group = agree_on_run(
                self._run,
                ranks,
                self.options.facts(),
                is_made_here=is_made_here,
                shares_batches=self._may_share(ranks, wanted=choice.share_batches),
            )
            self.session = self._start_session(ranks, target, group)
        finally:
            self._end_start()

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
            if self.session is None:
                self.preparation.use_options(options)
            else:
                self.session.resize(options)
            self.options = options
        if self.session is not None and options.delivery.in_flight.warning:
            warn(options.delivery.in_flight.warning)

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
            plan = replace(options.sampling.plan_settings(self._run.order, ranks), skips=self._run.skips)
            if delivery.in_flight.warning:
                warn(delivery.in_flight.warning)
            if broadcast is not None and not broadcast.is_leader:
                self.preparation.close()
                dataset = supervisor = None
            else:
                dataset = None if delivery.uses_processes else self.preparation.built_dataset()
                supervisor = self.preparation.supervisor_for(plan)
            session = Session(
                options,
                plan,
                target,
                file_number=file_number(ranks),
                dataset=dataset,
                supervisor=supervisor,
                broadcast=broadcast,
            )
            self._close_session = weakref.finalize(self, session.close)  # another thread may close it while it starts
            self.preparation.hand_over()
            self.check_open("the loader was closed while it started")
            session.start(self._run)
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
            agree_on_length(ranks, session.dispatcher.num_samples)
            self._run.note_length(session.dispatcher.num_samples)  # raises on all ranks, or on none
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
            self.start()
        assert self.session is not None
        return self.session

    def num_samples(self) -> int:
        """Return the dataset's length. Before `start` this may start a process that builds the dataset."""
        if self._run.num_samples is None:
            self._run.note_length(self.preparation.num_samples(self.plan_settings()))
        assert self._run.num_samples is not None
        return self._run.num_samples

    def plan_settings(self) -> PlanSettings:
        """Return the settings of this rank's plan; before `start`, as far as they are known."""
        sampling = self.options.sampling
        if self.session is not None:
            settings = self.session.plan.settings
        else:
            settings = sampling.plan_settings(self._run.order, expected_ranks(sampling.world_size))
        return replace(settings, skips=self._run.skips)

    def note_skip(self, plan: Plan) -> None:
        """Record the plan whose steps the user skips. Before `start`, it is one for the expected ranks."""
        if self.session is None:
            self._skips_world_size = plan.settings.world_size

    def _check_skips(self, ranks: Ranks) -> None:
        """Raise if steps were skipped that are others with these ranks."""
        expected = self._skips_world_size
        if expected not in (None, ranks.world_size):
            raise ValueError(
                f"skip() was called before start(), when there seemed to be {expected} rank(s), but {ranks.source} "
                f"says that there are {ranks.world_size}, whose steps have other samples. Make a new loader, and call "
                f"skip() after start()"
            )

    def fail(self, error: BaseException) -> None:
        """Close the session because there are no more batches.

        The session keeps the error, whose traceback refers to the loop and so to this object. As long as the session
        waits for this object's end, neither would end. After a stall, the loop may wait again.
        """
        if isinstance(error, (WorkerStalled, LoaderClosed)) or self.session is None:
            return
        if self._close_session is not None:
            self._failure = error
            run_finalizer(self._close_session)

    def close(self) -> None:
        """Stop all processes and threads, and issue the last warnings. Idempotent and thread-safe."""
        self.state = LoaderState.CLOSED
        self._release()
        if self.session is not None:
            self.session.dispatcher.issue_warnings()

    def _release(self) -> None:
        """Close what exists: the prepared supervisor, and the session, which may be starting."""
        self.preparation.close()
        if self._close_session is not None:
            run_finalizer(self._close_session)

    def __repr__(self) -> str:
        return f"<Lifecycle {self.state.value}, {self.session!r}>"
