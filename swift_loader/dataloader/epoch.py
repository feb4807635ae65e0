"""The epochs of a DataLoader: where their batches come from, how far the loop is, and where it could continue. And the
iterator over one.
"""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import dataloader as torch_iterators

from swift_loader.dataloader.draws import Draws, num_early_draws
from swift_loader.dataloader.options import DEFAULT_PREFETCH, num_samples_of
from swift_loader.dataloader.shards import Copies, Shards, SharedShards
from swift_loader.dataloader.state import LoaderPosition, SamplerState
from swift_loader.dataloader.workers import LoaderWorkers, Mover
from swift_loader.delivery.iterator import LoopIterator, ShownIterator, Turn
from swift_loader.errors import ForkHangs, LoaderClosed, RankMismatch, SwiftLoaderError, TooManyErrors, WorkerDied
from swift_loader.executors.handle import Handle
from swift_loader.options import AutoWorkers
from swift_loader.ranks.agreement import RankVotes
from swift_loader.runtime import is_interrupt, run_finalizer
from swift_loader.scheduler.delivery import Delivery
from swift_loader.scheduler.work import IndexWork, StreamRounds, StreamWork, Work, WorkSource
from swift_loader.worker.seeding import preserved_generators


class Got(NamedTuple):
    """What the loop has got, without the batch."""

    work: Work | None
    snapshot: bytes | None
    is_batch: bool
    """False: the error in its place."""


class Epoch:
    """Where the batches of an epoch come from: from workers, if it has them.

    A batch counts once it is `got`. Until then, an epoch that begins at the `position` gives it again.
    """

    is_dirty = False
    """Whether an exception came at what can't be done twice. Then another epoch has to begin at the position."""
    is_over = False
    """Whether the loop has met the end."""
    got: Got | None = None
    """What the loop has got and `settle` hasn't counted."""
    taken: Got | None = None
    """What it has taken, and gets if no exception comes in between."""
    built: Delivery | None = None
    """The next batch, if there are no workers and an exception came before the loop got it."""
    is_closed = False
    """Whether the loader was closed, so there are no more batches."""
    _num_sharing = 0
    """How many ranks the loader shares the stream out to. 0: the dataset does that."""
    votes: RankVotes | None = None
    """Given if the epoch is over as soon as it is over on one of the ranks."""

    def __init__(
        self, loader: DataLoader[Any], draws: Draws, resume: LoaderPosition | None, workers: LoaderWorkers | None = None
    ) -> None:
        """Begin an epoch, or continue one. `resume`: a position in it, or the end of the one before.

        `workers` are used until `close`, or until nobody refers to the epoch any more.
        """
        self._num_workers: int = loader.num_workers
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self.length_called: int | None = loader._IterableDataset_len_called  # noqa: SLF001
        """What `len` of the stream returned, if the user has asked the loader for its length."""
        self.draws = draws
        self._resumed = None if resume is None or resume.draws.begins_epoch else resume
        """Where it continues. None: it begins afresh."""
        self._num_settled = 0 if self._resumed is None else self._resumed.num_yielded
        self.num_votes = 0
        """How often the ranks have voted in this epoch."""
        self._mismatch: RankMismatch | None = None
        self.workers = workers
        """Those that serve it now."""
        self._mover: Mover = loader._mover  # type: ignore[attr-defined] # noqa: SLF001
        self._pull: Callable[[], Delivery] | None = None
        """Returns the next batch, the error in its place, or the end. None: there are no more."""
        self._end_processes = None if workers is None else workers.close
        self._fleet = None if workers is None else workers.fleet

    @property
    def number(self) -> int:
        """Which epoch of its loader it is, from 0."""
        return self.draws.begun.epoch

    @property
    def num_yielded(self) -> int:
        """How many batches of the epoch the loop has got."""
        got = self.got
        return self._num_settled + (got is not None and got.is_batch)

    def next(self) -> Delivery:
        """Return the next batch. It has no error.

        Raises `StopIteration`, what the dataset, the sampler or `collate_fn` raised, or `WorkerDied` and the like. With
        `votes`, it blocks until all ranks ask for theirs.
        """
        return self.take() if self.votes is None else self.next_of_all(self.votes)

    def take(self) -> Delivery:
        """Return the next batch, whatever the other ranks have."""
        self.settle()
        self.is_dirty = True
        self._get_ready()
        workers, pull = self.workers, self._pull
        if workers is None or pull is None:  # of a loader with persistent workers, and the next epoch has begun
            self._stop()
        delivery = pull()
        if delivery.error is not None:
            self._fail(workers.explained(delivery))
        if delivery.is_end:
            self.end()
            self._stop()
        self.taken = Got(delivery.work, delivery.snapshot, is_batch=True)
        if delivery.lease is not None:
            delivery.lease.keep()
        return delivery

    def _fail(self, delivery: Delivery) -> NoReturn:
        """Raise the error in a batch's place, which the loop gets by that."""
        got = None if delivery.work is None else Got(delivery.work, delivery.snapshot, is_batch=False)
        error, delivery.error = delivery.error, None  # its traceback refers to those who were here
        assert error is not None
        try:
            # No handler runs between these three.
            self.got = got
            self.is_dirty = False
            raise error
        finally:
            del error  # else it would be its own traceback that keeps it

    def _stop(self) -> NoReturn:
        """Say that there are no more batches."""
        self.is_dirty = False
        raise StopIteration

    def settle(self) -> None:
        """Count what the loop has got. If an exception ends this, the next call does it again."""
        if (got := self.got) is not None:
            self._count(got)
            self._num_settled, self.got = self._num_settled + got.is_batch, None

    def _get_ready(self) -> None:
        """Do what comes before a batch is taken. Raises `StopIteration` if there is none."""
        raise NotImplementedError

    def _count(self, got: Got) -> None:
        """Count what the loop has got, apart from `num_yielded`. Idempotent."""
        raise NotImplementedError

    def goes_on(self) -> bool:
        """Return whether the next `take` gives what the loop hasn't got, although this `is_dirty`."""
        return False

    def next_of_all(self, votes: RankVotes) -> Delivery:
        """Return the next batch if all ranks have one. An error in a batch's place counts as one."""
        if self.is_over:
            raise StopIteration
        if self._mismatch is not None:
            raise self._mismatch
        delivery, error = Delivery(is_end=True), None
        try:
            delivery = self.take()
        except StopIteration:
            pass
        except Exception as raised:
            if is_interrupt(raised):  # this rank asks again
                raise
            delivery, error = Delivery(), raised
        try:
            all_have = votes.all_have(not delivery.is_end, self.num_votes)
        except RankMismatch as mismatch:
            self._mismatch, self.is_dirty = mismatch, False  # the epoch has ended
            raise
        self.num_votes += 1
        if not all_have:
            self.end()
            self._stop()  # this rank's batch isn't lost: all end here
        if isinstance(error, ForkHangs):  # the ranks have voted, so the epoch can't go on with other workers
            raise WorkerDied(str(error)) from error
        if error is not None:
            raise error
        return delivery

    def take_back(self, taken: Delivery) -> None:  # noqa: ARG002 - an epoch may keep it
        """Take in that the loop didn't get what was taken."""
        self.got, self.is_dirty = None, True

    def end(self) -> None:
        """Take the epoch as over. Idempotent."""
        self.is_over = True
        if (workers := self.workers) is not None:  # another thread may close the loader meanwhile
            workers.end_pass()
        self.close()

    def position(self) -> LoaderPosition:
        """Return where the loop is."""
        raise NotImplementedError

    def _at(self, num_drawn: int, sampler_state: SamplerState | None, **more: Any) -> LoaderPosition:
        """Return the position after so many draws, see `Draws.state_at`, with more fields of it."""
        draws = self.draws.state_at(num_drawn, sampler_state, is_over=self.is_over)
        more |= {"num_workers": self._num_workers, "length_called": self.length_called}
        return LoaderPosition(
            draws, self._is_stream, num_yielded=self.num_yielded, num_sharing=self._num_sharing, **more
        )

    def describe(self) -> str:
        """Return its state, its number, and how many batches the loop got."""
        state = "stopped" if self._num_workers and self.workers is None else "running"
        return f"{'over' if self.is_over else state}, epoch {self.number}, batch {self.num_yielded:,}"

    def processes(self) -> list[Handle]:
        """Return the worker processes by id, also after the epoch."""
        return [] if self._fleet is None else self._fleet.processes()

    def shut_down(self) -> None:
        """End the workers. There are no more batches. Idempotent."""
        self.workers = self._pull = None
        if self._end_processes is not None:
            run_finalizer(self._end_processes)

    def close(self) -> None:
        """Let go of the workers, which end if they don't serve other epochs. There are no more batches. Idempotent."""
        workers, self.workers, self._pull = self.workers, None, None
        if workers is not None and not workers.may_stay:
            self.shut_down()


class SamplerWork(WorkSource):
    """The batches of a sampler, from a position on.

        sampler ──refill──► drawn ──next──► with workers ──note──► behind the loop
                              ◄─────rewind───────

    The loop's thread draws, because a sampler is the user's code. Any thread hands out.
    """

    def __init__(self, loader: DataLoader[Any], draws: Draws, resumed: LoaderPosition | None) -> None:
        """Draw nothing. `resumed`: a position in the middle of the epoch; None: it begins."""
        self.draws = draws
        self._num_bound = loader.num_workers if loader.in_order else 0
        """Worker i builds every n-th batch from batch i on, as with torch. Then a dataset that has a generator of its
        own in each worker draws the same in each run. 0: any worker builds any batch."""
        self._num_early = num_early_draws(loader)
        self.drawn: dict[int, Any] = {}
        """The indices of the steps that were drawn and aren't behind the loop, in the order of the draws."""
        self._waiting: deque[int] = deque()
        """Those that aren't handed out."""
        self.error: Exception | None = None
        """The sampler's, which comes after the batches that were drawn."""
        self._has_drawn_all = False
        self.is_intact = True
        """Whether the sampler can be asked again. An exception ends it, if it is a generator."""
        self.num_done = draws.num_drawn
        """All steps before this one are behind the loop."""
        self.ahead: set[int] = set() if resumed is None else set(resumed.ahead)
        """Later steps that are behind the loop, too, because they came out of order."""
        self.state_at_done = None if resumed is None else resumed.draws.sampler_state
        """The sampler's state after `num_done` draws."""
        self._states: dict[int, SamplerState | None] = {}
        """The same after each later step that was drawn."""
        self.busy: set[int] = set()
        """The workers that got work."""
        self._num_workers = loader.num_workers

    def refill(self, max_early: int, max_ahead: int) -> None:
        """Draw until so many batches aren't behind the loop. `max_early`: while nobody notices that draws are early."""
        while not self._has_drawn_all:
            if len(self.drawn) >= (max_early if self.draws.num_drawn < self._num_early else max_ahead):
                return
            self.is_intact = False
            try:
                drawn = self.draws.next()
            except Exception as error:  # the sampler's
                if is_interrupt(error):
                    raise
                self.error, drawn = error, None
            if drawn is None:
                self._has_drawn_all = self.is_intact = True
                return
            # A copy, because batch samplers may fill one list again and again. It is sent later.
            indices = drawn.indices.copy() if type(drawn.indices) is list else drawn.indices
            self._states[drawn.step] = drawn.sampler_state
            if drawn.step not in self.ahead:
                self.drawn[drawn.step] = indices
                self._waiting.append(drawn.step)
                self.busy.add(drawn.step % self._num_workers)
            self.is_intact = True

    def next(self) -> IndexWork | None:
        """Return the next work; None if nothing more is drawn yet."""
        if not self._waiting:
            return None
        step, num = self._waiting.popleft(), self._num_bound
        return IndexWork(self.draws.begun.epoch, step, self.drawn[step], step % num if num else None)

    def note(self, step: int) -> None:
        """Take a step as behind the loop. Idempotent."""
        if step == self.num_done and not self.ahead:  # nearly always
            # No handler runs between these two.
            self.state_at_done = self._states[step]
            self.num_done = step + 1
        self.drawn.pop(step, None)
        if step < self.num_done:
            self._states.pop(step, None)
            return
        done, states = {*self.ahead, step}, self._states
        while (number := self.num_done) in done and number in states:
            self.state_at_done, self.num_done = states[number], number + 1
            states.pop(number)
        self.ahead = {step for step in done if step >= self.num_done}

    def rewind(self) -> None:
        """Hand out again what was handed out and isn't behind the loop."""
        self._waiting = deque(self.drawn)

    def unbind(self) -> None:
        """Let any worker build any batch that isn't handed out yet. Any thread."""
        self._num_bound = 0


class IndexEpoch(Epoch):
    """One epoch of a sampler's batches."""

    def __init__(
        self,
        loader: DataLoader[Any],
        draws: Draws,
        workers: LoaderWorkers,
        resume: LoaderPosition | None,
        carried: dict[int, bytes] | None = None,
        source: SamplerWork | None = None,
    ) -> None:
        """Begin to build ahead of the loop. `carried`: see `Shards`. `source`: of another epoch, to go on with it."""
        super().__init__(loader, draws, resume, workers)
        self.source = source = source or SamplerWork(loader, draws, self._resumed)
        self._max_ahead = workers.limits.max_in_flight + self._mover.depth
        self._max_noticed = min(self._max_ahead, loader.num_workers * (loader.prefetch_factor or DEFAULT_PREFETCH))
        """The same for draws that a program notices, see `num_early_draws`. The same in the whole epoch."""
        self._shards = Shards(loader, resume, carried)
        self._pull = self._mover.ahead(self, workers.next, workers.is_ready)
        source.rewind()
        source.refill(self._max_ahead, self._max_noticed)
        workers.begin(source, self.draws.begun.base_seed, self._shards.resume)

    def _get_ready(self) -> None:
        source = self.source
        # One more, before the loop takes a batch, because it is sent then.
        source.refill(self._max_ahead + 1, self._max_noticed + 1)
        if not source.drawn:
            if source.error is not None:
                error, source.error, self.is_dirty = source.error, None, False
                raise error
            self.end()
            self._stop()

    def carry(self) -> dict[int, bytes] | None:
        """Return where workers begin the next epoch, see `Shards.carry`."""
        return self._shards.carry(self.source.busy)

    def resize(self, num_workers: int) -> None:
        """Let another number of workers build what the loop hasn't got yet. Any of them builds any batch from now on.

        Only for an epoch of which nothing shows who builds a batch, see `shows_its_worker`. Any thread, one at a time.
        """
        self.source.unbind()
        workers = self.workers  # the loop's thread may let go of them meanwhile
        if workers is not None:
            with suppress(LoaderClosed):
                workers.resize(num_workers)
            self._max_ahead = workers.limits.max_in_flight + self._mover.depth

    def _count(self, got: Got) -> None:
        assert got.work is not None, "a sampler's batches have work"
        self.source.note(got.work.step)
        if got.snapshot is not None:
            self._shards.note(got)

    def position(self) -> LoaderPosition:
        """Return where the loop is."""
        self.settle()
        source = self.source
        ahead, workers = sorted(source.ahead), self._shards.snapshots()
        return self._at(source.num_done, source.state_at_done, ahead=ahead, workers=workers)


class StreamEpoch(Epoch):
    """One epoch of a stream's shards."""

    def __init__(
        self,
        loader: DataLoader[Any],
        draws: Draws,
        workers: LoaderWorkers,
        resume: LoaderPosition | None,
        copies: Copies | None = None,
    ) -> None:
        """Begin to build ahead of the loop.

        `copies` gets the batches, and warns if all workers give the same; None: nobody need look.
        """
        super().__init__(loader, draws, resume, workers)
        self._copies, shard = copies, workers.shard
        take = workers.next if copies is None else partial(copies.noted, workers.next)
        self._pull = self._mover.ahead(self, take, workers.is_ready)
        self._num_sharing = 0 if shard is None else shard.world_size
        self._last_worker, first_batches = -1, None
        self._shards: Shards | SharedShards
        if shard is not None:
            self._shards = SharedShards(self._num_workers, resume, is_persistent=loader.persistent_workers)
            first_batches = self._shards.next_batches
        else:
            self._shards = Shards(loader, resume)
            self._last_worker = -1 if self._resumed is None else self._resumed.last_worker
        self._rounds = StreamRounds(
            self.draws.begun.epoch,
            self._num_workers,
            first_step=self.num_yielded,
            last_worker=self._last_worker,
            first_batches=first_batches,
        )
        workers.begin(self._rounds, self.draws.begun.base_seed, self._shards.resume)

    def _get_ready(self) -> None:
        if self._copies is not None:
            self._copies.warn()
        if self.is_over:
            self._stop()

    def _count(self, got: Got) -> None:
        if isinstance(got.work, StreamWork):
            self._shards.note(got)
            self._last_worker = got.work.worker_id

    def end(self) -> None:
        """Take the epoch as over. Idempotent."""
        super().end()
        if self._copies is not None:
            self._copies.warn()

    def position(self) -> LoaderPosition:
        """Return where the loop is."""
        self.settle()
        workers, last_worker = self._shards.snapshots(self._rounds), self._last_worker
        return self._at(self.num_yielded, None, last_worker=last_worker, workers=workers)


class LoaderIterator(  # type: ignore[misc] # torch's `__iter__` is the same
    LoopIterator,
    torch_iterators._BaseDataLoaderIter,  # noqa: SLF001 - libraries look for it
):
    """Yields the batches of one epoch. When nobody refers to it any more, the workers are free.

    An error of the user's code takes the place of its batch: the next call continues with the batch after it.
    """

    def __init__(self, loader: Any) -> None:
        """Begin an epoch of a loader."""
        super().__init__(Turn())
        loader._iterators.append(weakref.ref(self, loader._iterators.remove))  # noqa: SLF001
        self._reset(loader)
        changed: Any = torch_iterators._BaseDataLoaderIter.__init__  # noqa: SLF001
        if getattr(changed, "__globals__", None) is not vars(torch_iterators):  # by a library, as SpeechBrain does
            before = None if loader.generator is None else loader.generator.get_state()
            with preserved_generators():  # torch's part of it draws a seed
                changed(self, loader)
            if loader.generator is not None and before is not None:
                loader.generator.set_state(before)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:  # noqa: ARG002 - as torch
        """Begin an epoch. With persistent workers, a loader has one iterator, as with torch.

        If the loop has left this epoch, the first batch is that of the next one.
        """
        self.is_closed = False
        """Whether the loader was closed since `iter`."""
        self._epoch: Epoch
        self._epoch, self._passes_epoch = loader._begin()  # noqa: SLF001
        if self.is_closed:  # by another thread, meanwhile
            self._close()
        self._is_begun = False
        """Whether a batch was asked for."""
        self._loader: Any = weakref.ref(loader)
        self._kept = None if loader.persistent_workers else loader
        """Keeps the loader of `for batch in DataLoader(...)` alive, to begin again."""
        self._failure: SwiftLoaderError | None = None
        """Why there are no more batches."""
        self._errors, self._num_samples = loader._errors, num_samples_of(loader)  # noqa: SLF001
        self._is_tuned = isinstance(loader.num_workers, AutoWorkers)
        self._index_sampler = loader._index_sampler  # noqa: SLF001 - for `len`, as torch
        self._dataset_name = str(type(loader.dataset).__name__)
        self._has_workers = bool(loader.num_workers)
        self._num_yielded = self._num_left_out = 0
        self._bar = None  # of `ShownIterator`

    def _advance(self) -> Delivery:
        if self._failure is not None:
            raise self._failure
        loader, recorded = self._loader(), None
        if self._epoch.is_dirty and not self._epoch.goes_on():
            self._seek(loader)
        if self._is_tuned and loader is not None:
            loader._tune()  # noqa: SLF001
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined] # noqa: SLF001
            recorded = torch.autograd.profiler.record_function("enumerate(DataLoader)#LoaderIterator.__next__")
            recorded.__enter__()
        try:
            if self._num_left_out:
                self._leave_out(loader)
            epoch = self._epoch
            if not self._is_begun:
                delivery = self._first(loader)
            else:
                delivery = epoch.take() if epoch.votes is None else epoch.next_of_all(epoch.votes)
        except (StopIteration, LoaderClosed):
            self._note_end(loader)
            raise
        except ForkHangs as error:
            delivery = self._replace_forks(loader, error)
        finally:
            if recorded is not None:
                recorded.__exit__(None, None, None)
        if (length := self._epoch.length_called) is not None and self._num_yielded == length:
            self._num_yielded += 1  # it warns once
            self._warn_of_length(length)
        if delivery.failures:
            self._note_failures(delivery)
        return delivery

    def _note_failures(self, delivery: Delivery) -> None:
        try:
            self._errors.note(delivery.failures)
        except TooManyErrors as error:
            self._failure, self._epoch.is_dirty = error, False
            self._epoch.close()
            raise

    def _note(self, taken: Delivery) -> None:  # noqa: ARG002 - the epoch knows it
        self._num_yielded += 1
        epoch = self._epoch
        epoch.got = epoch.taken
        epoch.is_dirty, epoch.built = False, None

    def _take_back(self, taken: Delivery) -> None:
        self._epoch.take_back(taken)

    def _note_exception(self) -> None:
        workers = self._epoch.workers
        if workers is not None and workers.dispatcher.note_wait():
            self._epoch.is_dirty = False

    def _note_end(self, loader: Any) -> None:
        """Say what there is to say at the end of the epoch. Raises `LoaderClosed` if that is why there are no more."""
        if self.is_closed and not self._epoch.is_over:
            raise LoaderClosed("the loader was closed; iterate over it again") from None
        self._errors.warn()
        if loader is not None and not self._is_tuned:
            loader._observer.tell(loader)  # noqa: SLF001 - what would help, if the loop waited

    def _seek(self, loader: Any) -> None:
        """Go on with the batch that the loop hasn't got, after an exception that came at what can't be done twice."""
        before = self._epoch
        position = before.position()
        if before.is_over or self.is_closed:
            return
        if loader is None:
            raise SwiftLoaderError(
                "the loop was interrupted while it took a batch, and can't go on because its DataLoader is gone; keep "
                "a reference to the DataLoader"
            )
        before.close()
        source = before.source if isinstance(before, IndexEpoch) and before.source.is_intact else None
        epoch = loader._begin_epoch(position, source=source)  # noqa: SLF001
        epoch.num_votes = before.num_votes
        self._use(epoch)

    def _replace_forks(self, loader: Any, error: ForkHangs) -> Delivery:
        """Have fresh interpreters go on where the loop is, as a fork of the program hangs. Return the next batch."""
        if loader is None:
            raise error
        self._failure = error  # in case that nothing takes its place
        self._continue_with(loader, self._epoch.position(), error)
        self._failure = None
        return self._epoch.next()

    def _first(self, loader: Any) -> Delivery:
        """Return the first batch. `set_epoch` may have been called since `iter`, and counts."""
        if loader is not None and (self._passes_epoch or self._epoch.draws.is_stale):
            self._continue_with(loader, None if self._passes_epoch else self._epoch.position())
        self._errors.warn()  # of a pass that the loop has left
        self._errors.begin(self._epoch.number, self._num_samples)
        self._is_begun = True
        return self._epoch.next()

    def _leave_out(self, loader: Any) -> None:
        """Continue behind the batches that `_sampler_iter` has left out. With torch, they aren't built either."""
        number, self._num_left_out = self._num_left_out, 0
        position = self._epoch.position()
        draws = position.draws
        if position.is_stream:  # with torch, its samples don't depend on what is drawn
            return
        if loader is None or draws.sampler_state is not None:  # only drawing tells the state behind them
            for _ in range(number):
                self._epoch.next()
                self._epoch.got, self._epoch.built = self._epoch.taken, None
            return
        draws = replace(draws, num_drawn=draws.num_drawn + number)
        self._continue_with(loader, replace(position, draws=draws, num_yielded=position.num_yielded + number))

    def _continue_with(self, loader: Any, *where: LoaderPosition | ForkHangs | None) -> None:
        self._epoch.close()
        self._use(loader._begin_epoch(*where))  # noqa: SLF001

    def _use(self, epoch: Epoch) -> None:
        self._epoch = epoch
        if self.is_closed:  # by another thread, meanwhile
            self._close()

    def _warn_of_length(self, length: int) -> None:
        advice = (
            " For multiprocessing data-loading, this means that each worker's copy of the dataset gives everything: "
            "let it give only its share, see torch.utils.data.get_worker_info."
            if self._has_workers
            else ""
        )
        warnings.warn(
            f"Length of IterableDataset {self._dataset_name} was reported to be {length} (when accessing "
            f"len(dataloader)), but {self._num_yielded} samples have been fetched.{advice}",
            stacklevel=4,
        )

    @property
    def _workers(self) -> list[Handle]:
        """The worker processes that serve this epoch now, or served it last. Programs look at torch's so."""
        if not self._has_workers:
            raise AttributeError(f"{type(self).__name__} has no _workers with num_workers=0")
        return self._epoch.processes()

    def _shutdown_workers(self) -> None:
        """End the workers, as programs do it with torch's iterators. The next epoch gets new ones."""
        self._epoch.shut_down()

    def _close(self) -> None:
        """End the workers, because the loader is closed. Any thread."""
        self.is_closed = True
        if (epoch := getattr(self, "_epoch", None)) is not None:  # else it begins
            epoch.is_closed = True
            epoch.shut_down()

    @property
    def _index_queues(self) -> list[Handle]:
        """One for each worker: programs count torch's so."""
        return self._workers

    @property
    def _sampler_iter(self) -> Iterator[None]:
        """Each `next` of it leaves out a batch, as with torch's."""
        length = math.inf
        with suppress(Exception):  # a stream has none, nor may a sampler of the user's
            length = len(self)
        while self._epoch.num_yielded + self._num_left_out < length:
            self._num_left_out += 1
            yield

    @_sampler_iter.setter
    def _sampler_iter(self, _: object) -> None:
        """Keep ours: torch's `__init__` sets it."""

    def _next_data(self) -> Any:
        return next(self)

    def __repr__(self) -> str:
        return f"<LoaderIterator: {self._epoch.describe()}>"

    # No weakref.finalize: that would keep the epoch, whose error may refer to this iterator. At exit, the names of
    # modules may be gone, and the workers end anyway.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing() and hasattr(self, "_epoch"):
            self._epoch.close()

    def __getstate__(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} can't be pickled; pickle the loader")


class ShownLoaderIterator(ShownIterator, LoaderIterator):  # type: ignore[misc]
    """The same with a bar."""

    def _place(self) -> tuple[int, int, int | None, int]:
        epoch, length = self._epoch, None
        with suppress(Exception):  # a stream has none, nor may a sampler of the user's
            length = len(self)
        passes = self._passes_epoch and not self._is_begun
        return epoch.number + passes, 0 if passes else epoch.num_yielded, length, 0
