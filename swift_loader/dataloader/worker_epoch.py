"""Builds the batches of an epoch in worker processes."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

from torch.utils.data import DataLoader

from swift_loader.dataloader.draws import Drawn, DrawnEpoch, Draws
from swift_loader.dataloader.early_draws import num_early_draws
from swift_loader.dataloader.failures import lost_batch
from swift_loader.dataloader.processes import ProcessView
from swift_loader.dataloader.shards import Shards, SharedShards
from swift_loader.dataloader.sharing import Copies
from swift_loader.dataloader.sources import IndexQueue, StreamRounds
from swift_loader.dataloader.state import LoaderPosition
from swift_loader.dataloader.workers import DEFAULT_PREFETCH, LoaderWorkers, WorkerShelf
from swift_loader.errors import LoaderClosed
from swift_loader.interrupts import is_interrupt, run_finalizer
from swift_loader.scheduler.delivery import Delivery
from swift_loader.scheduler.work import IndexWork, StreamWork


class _WorkersInUse:
    """The workers of an epoch. They go back to the shelf at its end, or when nobody refers to the epoch any more."""

    def __init__(self, epoch: object, workers: LoaderWorkers, shelf: WorkerShelf) -> None:
        self._workers: LoaderWorkers | None = workers
        self._persist = workers.persist
        self.processes = workers.processes
        self._end_processes = workers.close
        self._give_back = weakref.finalize(epoch, shelf.put, workers)
        self.num_taken = 0
        """How many batches the epoch has taken."""

    def resize(self, num_workers: int) -> int | None:
        """Return how many batches may be in flight then. None: the epoch is over."""
        workers = self._workers  # the loop's thread may give them back meanwhile
        if workers is None:
            return None
        with suppress(LoaderClosed):
            workers.resize(num_workers)
        return workers.max_in_flight

    def next(self) -> Delivery:
        if self._workers is None:  # of a loader with persistent workers, and the next epoch has begun
            raise StopIteration
        delivery = self._workers.next()
        if self._workers.failure is not None:
            self._give_back()  # the error's traceback refers to the loop, so nothing global may refer to the error
        if delivery.num_before is not None:  # it is of a batch, or the end
            if delivery.num_before != self.num_taken:
                raise lost_batch()
            self.num_taken += 1
        return delivery

    def end_pass(self) -> None:
        """Record that the loop met the end. Idempotent."""
        if self._workers is not None:
            self._workers.end_pass()

    def give_back(self) -> None:
        """Idempotent."""
        self._workers = None
        run_finalizer(self._give_back)

    def shut_down(self) -> None:
        """End the processes, unless they serve another iterator by now. Idempotent."""
        if self._workers is not None or self._persist:
            self._end_processes()
        self.give_back()


class _WorkerEpoch(DrawnEpoch):
    """What epochs have in common whose batches are built by workers."""

    def __init__(self, loader: DataLoader[Any], draws: Draws, workers: LoaderWorkers, shelf: WorkerShelf) -> None:
        """Take the workers. `shelf` gets them back."""
        self.is_whole = True
        """See `Epoch`."""
        self._num_workers = loader.num_workers
        self._length_called: int | None = loader._IterableDataset_len_called  # noqa: SLF001
        self._draws = draws
        self._in_use = _WorkersInUse(self, workers, shelf)
        self._is_over = False

    def processes(self) -> list[ProcessView]:
        """Return the worker processes, also after the epoch."""
        return self._in_use.processes()

    def shut_down(self) -> None:
        """End the workers. There are no more batches. Idempotent."""
        self._in_use.shut_down()

    def close(self) -> None:
        """Leave the workers to the next epoch. There are no more batches. Idempotent."""
        self._in_use.give_back()


class IndexEpoch(_WorkerEpoch):
    """One epoch of a sampler's batches."""

    def __init__(
        self,
        loader: DataLoader[Any],
        draws: Draws,
        workers: LoaderWorkers,
        shelf: WorkerShelf,
        resume: LoaderPosition | None,
    ) -> None:
        """Begin to build ahead of the loop. `shelf` gets the workers back."""
        super().__init__(loader, draws, workers, shelf)
        self._queue = IndexQueue(draws.epoch, loader.num_workers, in_order=loader.in_order)
        self._max_ahead = workers.max_in_flight
        torch_ahead = loader.num_workers * (loader.prefetch_factor or DEFAULT_PREFETCH)
        self._max_noticed = min(workers.max_in_flight, torch_ahead)
        """The same for draws that a program notices, see `num_early_draws`. The same in the whole epoch."""
        self._num_early = num_early_draws(loader)
        self._num_in_flight = 0
        self._sampler_error: Exception | None = None
        self._has_drawn_all = False
        resumed = None if resume is None or resume.draws.is_over else resume
        self._num_done = draws.num_drawn
        """All steps before this one are behind the loop."""
        self._done_ahead: set[int] = set() if resumed is None else set(resumed.ahead)
        """Later steps that are behind the loop, too, because they came out of order."""
        self._num_yielded = 0 if resumed is None else resumed.num_yielded
        self._state_at_done = None if resumed is None else resumed.draws.sampler_state
        self._states: dict[int, tuple[Any, Any] | None] = {}
        """The sampler's state after each step that was drawn and isn't counted in `_num_done`."""
        self._shards = Shards(loader, resume)
        self._draw_ahead()
        workers.begin(self._queue, draws.base_seed, self._shards.resume())

    def _draw_ahead(self, num_taken: int = 0) -> None:
        """Draw until as many batches are in flight as may be. `num_taken` of them are about to be taken."""
        while not self._has_drawn_all and self._num_in_flight - num_taken < self._num_ahead:
            try:
                drawn = self._draws.next()
            except Exception as error:  # the sampler's: it comes after the batches that were drawn
                if is_interrupt(error):
                    raise
                self._sampler_error, drawn = error, None
            if drawn is None:
                self._has_drawn_all = True
            else:
                self._put(drawn)

    @property
    def _num_ahead(self) -> int:
        """How far ahead of the loop the next batch may be drawn."""
        is_early = self._draws.num_drawn < self._num_early
        return self._max_ahead if is_early else self._max_noticed

    def _put(self, drawn: Drawn) -> None:
        self._states[drawn.step] = drawn.sampler_state
        if drawn.step not in self._done_ahead:
            self._queue.put(drawn.step, drawn.indices)
            self._num_in_flight += 1

    def resize(self, num_workers: int) -> None:
        """Let another number of workers build what the loop hasn't got yet. Any of them builds any batch from now on.

        Only for an epoch of which nothing shows who builds a batch, see `binding`. Any thread, one at a time.
        """
        self._queue.unbind()
        max_ahead = self._in_use.resize(num_workers)
        if max_ahead is not None:
            self._max_ahead = max_ahead

    def next(self) -> Any:
        """Return the next batch.

        Raises `StopIteration`, what the dataset, the sampler or `collate_fn` raised, or `WorkerDied` and the like.
        """
        delivery = self._take()
        if delivery.error is not None:
            self.is_whole = True
            raise delivery.error
        self._num_yielded += 1
        return delivery.batch

    def _take(self) -> Delivery:
        """Return what the workers give next, and count it."""
        self.is_whole = False
        self._draw_ahead(num_taken=1)  # before that, because it is sent when the loop takes a batch
        if self._num_in_flight == 0:
            self._end()
        self.is_whole = True  # an interrupt of the wait loses nothing
        delivery = self._in_use.next()
        self.is_whole = False
        if isinstance(delivery.work, IndexWork):
            self._note(delivery.work.step)
            self._shards.note(delivery)
        return delivery

    def _end(self) -> None:
        self.is_whole = True
        if self._sampler_error is not None:
            error, self._sampler_error = self._sampler_error, None
            raise error
        self._is_over = True
        self._in_use.end_pass()
        self.close()
        raise StopIteration

    def _note(self, step: int) -> None:
        """Count a step that is behind the loop."""
        self._num_in_flight -= 1
        self._done_ahead.add(step)
        while self._num_done in self._done_ahead and self._num_done in self._states:
            self._done_ahead.remove(self._num_done)
            self._state_at_done = self._states.pop(self._num_done)
            self._num_done += 1

    def position(self) -> LoaderPosition:
        """Return where the loop is."""
        return LoaderPosition(
            num_workers=self._num_workers,
            is_stream=False,
            num_yielded=self._num_yielded,
            draws=self._draws.state_at(self._num_done, self._state_at_done, is_over=self._is_over),
            ahead=tuple(sorted(self._done_ahead)),
            workers=self._shards.snapshots(),
            length_called=self._length_called,
        )


class StreamEpoch(_WorkerEpoch):
    """One epoch of a stream's shards."""

    def __init__(
        self,
        loader: DataLoader[Any],
        draws: Draws,
        workers: LoaderWorkers,
        shelf: WorkerShelf,
        resume: LoaderPosition | None,
        copies: Copies | None = None,
    ) -> None:
        """Begin to build ahead of the loop. `shelf` gets the workers back.

        `copies` gets the batches, and warns if all workers give the same; None: nobody need look.
        """
        super().__init__(loader, draws, workers, shelf)
        self._copies = copies
        resumed = None if resume is None or resume.draws.is_over else resume
        self._num_yielded = 0 if resumed is None else resumed.num_yielded
        self._last_worker = -1 if resumed is None else resumed.last_worker
        self._shards: Shards | SharedShards = Shards(loader, resume)
        shard, first_batches = workers.shard, None
        self._num_sharing = 0 if shard is None else shard.world_size
        if shard is not None:
            self._shards = SharedShards(self._num_workers, resume, is_persistent=loader.persistent_workers)
            self._last_worker, first_batches = -1, self._shards.next_batches
        self._rounds = StreamRounds(
            self._draws.epoch,
            self._num_workers,
            first_step=self._num_yielded,
            last_worker=self._last_worker,
            first_batches=first_batches,
        )
        workers.begin(self._rounds, self._draws.base_seed, self._shards.resume())

    def next(self) -> Any:
        """Return the next batch. Raises as that of `IndexEpoch` does."""
        if self._copies is not None:
            self._copies.warn()
        if self._is_over:
            raise StopIteration
        delivery = self._in_use.next()
        self.is_whole = delivery.is_end
        if self._copies is not None:
            self._copies.note(delivery)
        if delivery.is_end:
            self.end()
            if self._copies is not None:
                self._copies.warn()
            raise StopIteration
        if isinstance(delivery.work, StreamWork):
            self._shards.note(delivery)
            self._last_worker = delivery.work.worker_id
        if delivery.error is not None:
            self.is_whole = True
            raise delivery.error
        self._num_yielded += 1
        return delivery.batch

    def end(self) -> None:
        """Take the epoch as over. Idempotent."""
        self._is_over = True
        self._in_use.end_pass()
        self.close()

    def position(self) -> LoaderPosition:
        """Return where the loop is."""
        return LoaderPosition(
            num_workers=self._num_workers,
            is_stream=True,
            num_yielded=self._num_yielded,
            draws=self._draws.state_at(self._num_yielded, None, is_over=self._is_over),
            last_worker=self._last_worker,
            workers=self._shards.snapshots(self._rounds.end_of),
            length_called=self._length_called,
            num_sharing=self._num_sharing,
        )
