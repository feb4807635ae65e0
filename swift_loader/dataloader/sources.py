"""What a DataLoader delivers in an epoch, how far the loop is in it, and where it could continue.

LoaderSource             of an epoch
├── SamplerSource        batches of a sampler
└── StreamSource         batches of a stream's shards, each read by a worker

`LoaderWorkers` build the batches. Without workers, `InlineWorkers` stand for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from swift_loader.dataloader.draws import Draws, num_early_draws
from swift_loader.dataloader.inline import InlineWorkers
from swift_loader.dataloader.options import DEFAULT_PREFETCH
from swift_loader.dataloader.shards import Copies, Shards, SharedShards
from swift_loader.dataloader.state import LoaderPosition, SamplerState
from swift_loader.dataloader.workers import LoaderWorkers, Mover
from swift_loader.errors import LoaderClosed, SwiftLoaderError
from swift_loader.executors.fleet import Fleet
from swift_loader.executors.handle import Handle
from swift_loader.ranks.agreement import RankVotes
from swift_loader.runtime import is_interrupt, run_finalizer
from swift_loader.sampling.progress import Progress, Steps
from swift_loader.sampling.work import IndexWork, StreamRounds, StreamWork, WorkSource
from swift_loader.scheduler.delivery import Delivery

AnyWorkers = LoaderWorkers | InlineWorkers


class LoaderSource(Progress):
    """An epoch. The loop's thread uses it, but for what says otherwise."""

    workers: AnyWorkers | None = None
    """Those that serve it now."""
    is_known = True
    """Whether it is known what the user's iterator has given."""
    _inline: InlineWorkers | None = None
    """What stands for workers if there are none. Also after the end."""
    votes: RankVotes | None = None
    """Given if the epoch is over as soon as it is over on one of the ranks."""
    num_votes = 0
    """How often the ranks have voted in this epoch."""
    _num_sharing = 0
    """How many ranks the loader shares the stream out to. 0: the dataset does that."""
    _pull: Callable[[], Delivery] | None = None
    """Returns the next batch, the error in its place, or the end. None: there are no more."""
    _fleet: Fleet | None = None
    _end_processes: Any = None
    _shards: Shards | SharedShards
    """What is known of the workers' datasets."""

    def __init__(self, loader: DataLoader[Any], draws: Draws, resume: LoaderPosition | None) -> None:
        """An epoch that begins afresh, or continues. `resume`: a position in it, or the end of the one before."""
        self._num_workers: int = loader.num_workers
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self.length_called: int | None = loader._IterableDataset_len_called  # noqa: SLF001
        """What `len` of the stream returned, if the user has asked the loader for its length."""
        self.draws = draws
        self._resumed = None if resume is None or resume.draws.begins_epoch else resume
        """Where it continues. None: it begins afresh."""
        self.num_got = 0 if self._resumed is None else self._resumed.num_yielded
        self._mover: Mover = loader._mover  # type: ignore[attr-defined] # noqa: SLF001

    def _use(self, workers: AnyWorkers, take: Callable[[], Delivery]) -> None:
        """Use these workers until `close`, or until nobody refers to this any more."""
        self.workers, self._fleet, self._end_processes = workers, workers.fleet, workers.close
        self._inline = workers if isinstance(workers, InlineWorkers) else None
        self._pull = self._mover.ahead(self, take, workers.is_ready)

    @property
    def number(self) -> int:
        """Which epoch of its loader it is, from 0."""
        return self.draws.begun.epoch

    @property
    def num_yielded(self) -> int:
        """How many batches of the epoch the loop has got."""
        return self.present().num_got

    def take(self) -> Delivery:
        """Return the next batch, the error in its place, or the end. What it raises says nothing about the batch.

        An error of no batch has no work.
        """
        delivery, workers, pull = self._get_ready(), self.workers, self._pull
        if delivery is None:
            if workers is None or pull is None:  # they were ended, or those that persist serve another epoch
                return Delivery(is_end=True)
            delivery = pull()
            if delivery.error is not None:
                delivery = workers.explained(delivery)
        if delivery.is_end:
            self.end()
        return delivery

    def _get_ready(self) -> Delivery | None:
        """Do what comes before a batch is taken. Return what comes instead of one."""
        raise NotImplementedError

    def can_continue(self) -> bool:
        """Return whether the next `take` gives what the loop hasn't got, although an exception has ended the last.

        So it is without workers, if what an iterator has given is known. Raises `SwiftLoaderError` if it can't be had
        again.
        """
        if (inline := self._inline) is None or not self.is_known:
            return False
        self._use(inline, inline.next)
        self.rewind()
        return True

    def rewind(self) -> None:
        """Hand out again what was handed out and isn't behind the loop."""
        raise NotImplementedError

    def end(self) -> None:
        """Take the epoch as over. Idempotent."""
        self.is_over = True
        if (workers := self.workers) is not None:  # another thread may close the loader meanwhile
            workers.end_pass()
        self.close()

    def position(self) -> LoaderPosition:
        """Return where the loop is. Any thread."""
        return self.present()._position()  # noqa: SLF001 - of the same class

    def _position(self) -> LoaderPosition:
        """Return it, as far as it is settled."""
        raise NotImplementedError

    def _detach(self) -> None:
        self._shards = copy(self._shards)
        self._shards.detach()

    def _at(self, num_drawn: int, sampler_state: SamplerState | None, **more: Any) -> LoaderPosition:
        """Return the position after so many draws, see `Draws.state_at`, with more fields of it."""
        draws = self.draws.state_at(num_drawn, sampler_state, is_over=self.is_over)
        more |= {"num_workers": self._num_workers, "length_called": self.length_called}
        return LoaderPosition(draws, self._is_stream, num_yielded=self.num_got, num_sharing=self._num_sharing, **more)

    def describe(self) -> str:
        """Return its state, its number, and how many batches the loop got."""
        state = "stopped" if self._num_workers and self.workers is None else "running"
        return f"{'over' if self.is_over else state}, epoch {self.number}, batch {self.num_yielded:,}"

    def processes(self) -> list[Handle]:
        """Return the worker processes by id, also after the epoch."""
        return [] if self._fleet is None else self._fleet.processes()

    def shut_down(self) -> None:
        """End the workers. There are no more batches. Idempotent. Any thread."""
        self.workers = self._pull = None
        if self._end_processes is not None:
            run_finalizer(self._end_processes)

    def close(self) -> None:
        """Let go of the workers, which end if they don't serve other epochs. There are no more batches. Idempotent."""
        workers, self.workers, self._pull = self.workers, None, None
        if workers is not None and not workers.may_stay:
            self.shut_down()


class SamplerSource(LoaderSource, WorkSource):
    """The batches of a sampler, from a position on.

        sampler ──refill──► drawn ──next──► with workers ──settle──► behind the loop
                              ◄─────rewind───────

    The loop's thread draws, because a sampler is the user's code. Any thread hands out.
    """

    _shards: Shards

    def __init__(self, loader: DataLoader[Any], draws: Draws, resume: LoaderPosition | None) -> None:
        """Draw nothing."""
        super().__init__(loader, draws, resume)
        self._num_bound = loader.num_workers if loader.in_order else 0
        """Worker i builds every n-th batch from batch i on, as with torch. Then a dataset that has a generator of its
        own in each worker draws the same in each run. 0: any worker builds any batch."""
        self._num_early = num_early_draws(loader)
        self._max_noticed = loader.num_workers * (loader.prefetch_factor or DEFAULT_PREFETCH)
        """How far ahead a program may notice that draws are early, see `num_early_draws`. The same in all the epoch."""
        self._drawn: dict[int, Any] = {}
        """The indices of the steps that were drawn and aren't behind the loop, in the order of the draws."""
        self._waiting: deque[int] = deque()
        """Those that aren't handed out."""
        self._error: Exception | None = None
        """The sampler's, which comes after the batches that were drawn. Then it is asked again, as with torch."""
        self._has_drawn_all = False
        resumed = self._resumed
        self._steps = Steps(draws.num_drawn)
        self._came_before = set[int]() if resumed is None else set(resumed.ahead)
        """Later steps that came before the resume, and aren't drawn yet."""
        self._states = {} if resumed is None else {draws.num_drawn - 1: resumed.draws.sampler_state}
        """The sampler's state after each step that was drawn and isn't behind the loop, and after the last that is."""
        self._busy: set[int] = set()
        """The workers that got work."""

    def begin(
        self,
        loader: DataLoader[Any],
        workers: AnyWorkers,
        resume: LoaderPosition | None,
        carried: dict[int, bytes] | None,
    ) -> None:
        """Begin to build ahead of the loop, or anew after an interrupt. `resume`: where the loop is. `carried`: see
        `Shards`.
        """
        self._use(workers, workers.next)
        self._num_workers, self._max_ahead = loader.num_workers, workers.num_ahead
        self._max_noticed = min(self._max_ahead, self._max_noticed)
        self._shards = Shards(loader, resume, carried)
        self._refill()
        workers.begin(self, self.draws.begun.base_seed, self._shards.resume)

    def _refill(self, num_more: int = 0) -> None:
        """Draw until as many batches aren't behind the loop as may be in flight, and so many more."""
        while not self._has_drawn_all and self._error is None:
            is_noticed = self.draws.num_drawn >= self._num_early
            if len(self._drawn) >= num_more + (self._max_noticed if is_noticed else self._max_ahead):
                return
            self.is_known = False  # an exception ends a sampler, if it is a generator
            try:
                drawn = self.draws.next()
            except Exception as error:
                if is_interrupt(error):
                    raise
                self._error, self.is_known = error, True
                return
            if drawn is None:
                self._has_drawn_all = self.is_known = True
                return
            # A copy, because batch samplers may fill one list again and again. It is sent later.
            indices = drawn.indices.copy() if type(drawn.indices) is list else drawn.indices
            self._states[drawn.step] = drawn.sampler_state
            if drawn.step in self._came_before:
                self._note(drawn.step)
                self._came_before.discard(drawn.step)
            else:
                self._drawn[drawn.step] = indices
                self._waiting.append(drawn.step)
                self._busy.add(drawn.step % max(1, self._num_workers))
            self.is_known = True

    def next(self) -> IndexWork | None:
        """Return the next work; None if nothing more is drawn yet."""
        if not self._waiting:
            return None
        step, num = self._waiting.popleft(), self._num_bound
        return IndexWork(self.number, step, self._drawn[step], step % num if num else None)

    def rewind(self) -> None:
        """Hand out again what was handed out and isn't behind the loop."""
        self._waiting = deque(self._drawn)

    def _get_ready(self) -> Delivery | None:
        self._refill(1)  # one more, before the loop takes a batch, because it is sent then
        if self._drawn:
            return None
        error, self._error = self._error, None
        return Delivery(error=error, is_end=error is None)

    def carry(self) -> dict[int, bytes] | None:
        """Return where workers begin the next epoch, see `Shards.carry`."""
        return self._shards.carry(self._busy)

    def resize(self, num_workers: int) -> None:
        """Let another number of workers build what the loop hasn't got yet. Any of them builds any batch from now on.

        Only for an epoch of which nothing shows who builds a batch, see `shows_its_worker`. Any thread, one at a time.
        """
        self._num_bound = 0
        workers = self.workers  # the loop's thread may let go of them meanwhile
        if isinstance(workers, LoaderWorkers):
            with suppress(LoaderClosed):
                workers.resize(num_workers)
            self._max_ahead = workers.num_ahead

    def _count(self, got: Any) -> None:
        self._note(got.work.step)
        if got.snapshot is not None:
            self._shards.note(got)

    def _detach(self) -> None:
        super()._detach()
        self._steps, self._drawn, self._states = copy(self._steps), dict(self._drawn), dict(self._states)

    def _note(self, step: int) -> None:
        """Take a step as behind the loop. Idempotent."""
        steps, states = self._steps, self._states
        before = steps.first
        steps.note(step)
        self._drawn.pop(step, None)
        for number in range(before - 1, steps.first - 1):  # one, nearly always
            states.pop(number, None)

    def _position(self) -> LoaderPosition:
        steps = self._steps
        ahead, state = sorted(steps.ahead | self._came_before), self._states.get(steps.first - 1)
        workers = self._shards.snapshots() if self._inline is None else (self._inline.snapshot(),)
        return self._at(steps.first, state, ahead=ahead, workers=workers)


class StreamSource(LoaderSource, StreamRounds):
    """The batches of a stream's shards."""

    def __init__(
        self,
        loader: DataLoader[Any],
        draws: Draws,
        workers: AnyWorkers,
        resume: LoaderPosition | None,
        copies: Copies | None,
    ) -> None:
        """Begin to build ahead of the loop.

        `copies` gets the batches, and warns if all workers give the same; None: nobody need look.
        """
        LoaderSource.__init__(self, loader, draws, resume)
        self._copies, shard = copies, workers.shard
        self._use(workers, workers.next if copies is None else partial(copies.noted, workers.next))
        self._last_got = -1 if self._resumed is None or shard is not None else self._resumed.last_worker
        """The worker whose batch the loop got last."""
        self._num_done = self.num_got
        """Without workers: how many steps are behind the loop, counting those that failed."""
        if shard is not None:
            self._num_sharing = shard.world_size
        self._shards = (
            Shards(loader, resume)
            if shard is None
            else SharedShards(max(1, self._num_workers), resume, is_persistent=loader.persistent_workers)
        )
        if self._inline is not None:
            self._shards.begun = [self._inline.begun]
        workers.begin(self, self.draws.begun.base_seed, self._shards.resume)

    def rewind(self) -> None:
        """Begin the rounds where the loop is."""
        StreamRounds.__init__(
            self,
            self.number,
            max(1, self._num_workers),
            first_step=self._num_done,
            last_worker=self._last_got,
            first_batches=self._shards.next_batches if isinstance(self._shards, SharedShards) else None,
        )

    def _get_ready(self) -> None:
        if self._copies is not None:
            self._copies.warn()

    def can_continue(self) -> bool:
        """See `LoaderSource`."""
        inline = self._inline
        self.is_known = inline is not None and (
            inline.num_begun in (None, self._num_done) or inline.is_kept(self._num_done)
        )
        if not self.is_known and inline is not None and (iterator := inline.own_iterator) is not None:
            raise SwiftLoaderError(
                f"the loop was interrupted while it read the {type(iterator).__name__}, which is its own iterator and "
                f"can't begin again, so a batch may be lost. Begin a new epoch, or give the dataset a state_dict and a "
                f"load_state_dict"
            )
        return super().can_continue()

    def _count(self, got: Any) -> None:
        if isinstance(got.work, StreamWork):
            self._shards.note(got)
            self._last_got, self._num_done = got.work.worker_id, got.work.step + 1

    def end(self) -> None:
        """Take the epoch as over. Idempotent."""
        super().end()
        if self._copies is not None:
            self._copies.warn()

    def _position(self) -> LoaderPosition:
        inline, workers = self._inline, self._shards.snapshots(self)
        if inline is not None and (self.is_over or inline.num_begun in (None, self._num_done)):  # else it is further
            now = inline.snapshot()
            workers = (replace(now, next_batch=workers[0].next_batch),) if now.has_state or now.has_ended else workers
        return self._at(self.num_got, None, last_worker=self._last_got, workers=workers)
