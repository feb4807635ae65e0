"""Copies batches to the device ahead of the loop. Runs in the loop's thread, apart from moves in the background.

    HostSource ──take──► batch on the host ──move──► ahead, `depth` of them ──take──► the loop

Nothing is lost if a Ctrl-C comes at any point: a batch that was taken from the source stays until it is moved, and a
moved one until the loop takes it.

A loader with a device is such a source. `DevicePrefetcher` makes one of any iterable. It asks for the next batch before
it hands out the current one; work that the loop has queued on a GPU goes on meanwhile. A SwiftLoader doesn't need it:
`loader.start(device=...)` takes ready batches and never blocks to get ahead.
"""

from __future__ import annotations

import copy
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from swift_loader.checks import check_integer
from swift_loader.device.accelerator import default_device, device_of
from swift_loader.device.move import Parcel, Target
from swift_loader.device.streams import CopiesInFlight, HostSource, Transfer
from swift_loader.errors import StateMismatch
from swift_loader.ranks.ranks import expected_ranks
from swift_loader.runtime import Closing
from swift_loader.sampling.permutation import Purpose, derive_key
from swift_loader.scheduler.delivery import Delivery

if TYPE_CHECKING:
    import torch

# Keys for random numbers on the device, derived from the batch alone. Runs in the loop's thread.

_current: ContextVar[tuple[HostSource, Delivery] | None] = ContextVar("swift_loader_batch_key", default=None)


def batch_key() -> int:
    """Return the key of the batch that is being moved, a 64-bit integer. For use in `to_device`.

    The key depends on (seed, epoch, position, rank). It differs for each batch, rank and epoch, and is the same after a
    resume. Seed a generator with it: `torch.Generator(device).manual_seed(batch_key())`. Outside of a move, each call
    returns a new random number, so a function can be tried alone.
    """
    current = _current.get()
    return int.from_bytes(os.urandom(8), "little") if current is None else current[0].key_of(current[1])


@contextmanager
def keyed_by(source: HostSource, delivery: Delivery) -> Iterator[None]:
    """Return a context in which `batch_key` returns the key of a batch, in this thread."""
    token = _current.set((source, delivery))
    try:
        yield
    finally:
        _current.reset(token)


SHORT_STEP_NS = 1_000_000
"""After a shorter step, the loop's thread moves the next batch itself. A hand-over to another thread costs more."""


class PrefetchQueue:
    """The batches of a pass that are moved and not taken yet. An error or the end stays at the front."""

    goes_on = False
    """Whether the source is asked again after an error, which takes only its batch's place, and after the end."""

    def __init__(
        self,
        source: HostSource,
        copies: CopiesInFlight,
        depth: int,
        num_batches: int = sys.maxsize,
        *,
        in_background: bool = False,
    ) -> None:
        """Get ready. The copies come after the work that the loop has queued before the first `take`.

        `copies`: the running ones of all passes. `depth`: batches that may be on the device ahead of the loop.
        `num_batches`: how many to pull at most. `in_background`: while the loop is busy for long enough, another thread
        moves them, see `CopiesInFlight.issue`.
        """
        self._source = source
        self._copies = copies
        self._depth = depth
        self._num_left = num_batches
        self._in_background = in_background
        self._left_ns = 0
        """When the loop left `take`."""
        self._is_begun = False
        self._pulled: Delivery | None = None
        """A batch that isn't moved yet because of an interrupt."""
        self._ahead: deque[tuple[Delivery, Transfer | None]] = deque()
        """An entry without copies holds an error or the end. It is the last entry."""

    def take(self) -> Delivery:
        """Return the next batch, on the device, or the error or the end in its place."""
        was_away = time.perf_counter_ns() - self._left_ns > SHORT_STEP_NS
        try:
            return self._take(in_background=self._in_background and was_away)
        finally:
            self._left_ns = time.perf_counter_ns()

    def _take(self, *, in_background: bool) -> Delivery:
        self._copies.begin_step()
        if not self._is_begun:
            self._copies.stream.catch_up()
            self._is_begun = True
        if not self._ahead:  # only this pull may block
            self._fetch(in_background=False)
        delivery, transfer = self._ahead[0]
        if transfer is not None:
            transfer.wait()
            delivery.batch = transfer.batch
            if transfer.error is not None:  # its traceback refers to the transfer, which mustn't refer to it
                delivery.error, transfer.error = transfer.error, None
            if delivery.error is None:
                transfer.hand_over()  # before the next copies are asked for
            elif not self.goes_on:
                self.abandon(delivery.error)
                return delivery
        elif not self.goes_on:
            return delivery
        while len(self._ahead) <= self._depth and (
            self._pulled or (self._num_left > 0 and self._ahead[-1][1] and self._source.is_ready())
        ):
            self._fetch(in_background=in_background)
        if self._ahead[-1][1] is transfer:  # nothing was moved, which would have done that
            self._copies.drop_finished()
        self._ahead.popleft()  # last: a Ctrl-C before it loses nothing
        return delivery

    @property
    def is_over(self) -> bool:
        """Whether no batch is left to take."""
        return bool(self._ahead) and self._ahead[0][1] is None

    def abandon(self, error: BaseException) -> None:
        """Drop the batches. Each later `take` returns this error."""
        self._pulled, self._num_left = None, 0
        self._ahead.clear()
        self._ahead.append((Delivery(error=error), None))

    def _fetch(self, *, in_background: bool) -> None:
        if self._pulled is None:
            self._pulled = self._source.take()
            self._num_left -= 1
        pulled, transfer = self._pulled, None
        moved = pulled
        if pulled.error is None and not pulled.is_end:
            if pulled.lease is not None and not (isinstance(pulled.batch, Parcel) and pulled.batch.is_all_moved):
                pulled.lease.show()  # a function of the user's gets it, or a part stays where it is
            with keyed_by(self._source, pulled):
                transfer = self._copies.issue(self._source, pulled, in_background=in_background)
            # `pulled` stays with the copy, which reads its batch.
            moved = Delivery(pulled.work, failures=pulled.failures, snapshot=pulled.snapshot)
        entry = moved, transfer
        self._pulled = None  # not after an interrupt: the next call moves it
        self._ahead.append(entry)  # no handler runs between these two

    def __repr__(self) -> str:
        return f"{len(self._ahead)} ahead"


class _LazyPass:
    """An iterator that begins its pass with the first `next`. If that raises, the second one tries again."""

    def __init__(self, prefetcher: DevicePrefetcher) -> None:
        self._prefetcher = prefetcher
        self._next: Callable[[], Any] | None = None

    def __iter__(self) -> _LazyPass:
        return self

    def __next__(self) -> Any:
        if self._next is None:
            self._next = self._prefetcher._begin_pass()  # noqa: SLF001 - of this package
        return self._next()


class DevicePrefetcher(Closing):
    """Moves the batches of an iterable to a device, ahead of the loop.

    The source is any iterable: a torch DataLoader, a list, a generator, a loader of FFCV or DALI. Each `iter` begins a
    pass over it. If the source is its own iterator (a generator), the next pass continues with what is left. No batch
    that was moved ahead is lost.

    `len`, `set_epoch`, `state_dict`, `load_state_dict` and `reset` use the source's methods. A state belongs to the
    last batch that the loop got, not to the last one that the source gave. So the source is asked for its state after
    each batch.
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        device: torch.device | str | int | None = None,
        to_device: Callable[..., Any] | None = None,
        *,
        dtype: torch.dtype | None = None,
        max_nb_batch_on_device: int = 1,
        seed: int | None = None,
    ) -> None:
        """Make a prefetcher. This takes nothing from the source yet.

        Args:
            iterable: The source of batches.
            device: Where batches go: anything that `torch.device` takes. Default: the current accelerator, else the
                CPU.
            to_device: Function `to_device(batch, device)` that moves a batch, and may [augment
                it](device.md#augment-on-the-gpu). It is called once per batch, beside the loop's work. Default:
                `swift_loader.to_device`.
            dtype: A `torch.dtype`. Floating-point tensors are converted to it on the device. None: they keep theirs.
            max_nb_batch_on_device: How many batches are copied to the device ahead of the loop, at least 1.
            seed: Base of `batch_key()`, which counts epochs and batches from the start of this prefetcher. Default: the
                seed of torch's generator, `torch.initial_seed()`.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: An argument is out of its range.
        """
        if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
            raise TypeError(f"a {type(iterable).__name__} can't be iterated over; give an iterable of batches")
        self.device = default_device() if device is None else device_of(device)
        self._source = iterable
        self._target = Target(self.device, to_device, dtype)
        self._depth = check_integer("max_nb_batch_on_device", max_nb_batch_on_device, 1)
        self._seed = None if seed is None else check_integer("seed", seed, 0)
        self._copies: CopiesInFlight | None = None
        """None before the first pass."""
        self._close_copies: weakref.finalize[..., DevicePrefetcher] | None = None
        self._queue: weakref.ref[PrefetchQueue] | None = None
        """The last pass's batches, while its iterator lives."""
        self._kept: PrefetchQueue | None = None
        """The same if the source is its own iterator. They stay, because the next pass continues with them."""
        self._next_epoch = 0
        self._state: Any = None
        """The source's state after the last batch that the loop got."""

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over a pass, which begins at the first `next`. After an error, each `next` raises it."""
        return _LazyPass(self)

    def __len__(self) -> int:
        """Return the source's length. It raises TypeError if there is none."""
        return len(self._source)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, on the source or its sampler."""
        self._next_epoch = check_integer("epoch", epoch, 0)
        sampler, batch_sampler = getattr(self._source, "sampler", None), getattr(self._source, "batch_sampler", None)
        for taker in (self._source, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
            if callable(getattr(taker, "set_epoch", None)):
                before = _snapshot(self._source)
                taker.set_epoch(epoch)  # type: ignore[union-attr]
                if not _is_equal(_snapshot(self._source), before):
                    self._state = None  # the epoch is part of the state
                return

    def state_dict(self) -> Any:
        """Return the source's state after the last batch that the loop got; {} if the source has none.

        The source is asked after each of its batches, because it can't tell later. If it raised then, so does this.
        """
        state = _snapshot(self._source) if self._state is None else self._state
        if isinstance(state, Exception):
            raise state
        return copy.deepcopy(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the source at this state, with the next pass. An iterator in use raises an error from now on.

        Raises:
            StateMismatch: The source takes no state.
        """
        load = getattr(self._source, "load_state_dict", None)
        if callable(load):
            load(state)
        elif state:
            raise StateMismatch(f"a {type(self._source).__name__} has no load_state_dict() to take this state")
        self._abandon("load_state_dict()")

    def reset(self) -> None:
        """Reset the source, as DALI's iterators require between passes. Drops the batches that were moved ahead.

        Raises:
            TypeError: The source has no `reset()`.
        """
        reset = getattr(self._source, "reset", None)
        if not callable(reset):
            raise TypeError(f"a {type(self._source).__name__} has no reset(); begin a new pass with iter()")
        reset()
        self._abandon("reset()")

    source = property(attrgetter("_source"), doc="The iterable that gives the batches.")
    dataset = property(attrgetter("_source.dataset"), doc="The source's dataset.")
    sampler = property(attrgetter("_source.sampler"), doc="The source's sampler.")
    batch_sampler = property(attrgetter("_source.batch_sampler"), doc="The source's batch sampler.")
    batch_size = property(attrgetter("_source.batch_size"), doc="The source's batch size.")

    def close(self) -> None:
        """Drop the batches that were moved ahead and wait for the running copies. Idempotent. Keeps the source."""
        self._abandon("close()")
        if self._close_copies is not None:
            self._close_copies()
        self._copies = None

    def _begin_pass(self) -> Callable[[], Any]:
        """Begin a pass over the source, or continue one that can't begin again. Return what returns its next batch."""
        import torch

        batches = iter(self._source)
        is_its_own = batches is self._source
        queue = self._kept if is_its_own else None
        if queue is None or queue.is_over:
            if self._copies is None:
                self._copies = CopiesInFlight(self._target.make_stream(), self._depth)
                self._close_copies = weakref.finalize(self, self._copies.close)
            self._state = _snapshot(self._source) or None
            seed = torch.initial_seed() if self._seed is None else self._seed
            host = _HostPass(self._source, batches, self._copies, self._target, seed, self._next_epoch)
            self._next_epoch += 1
            queue = PrefetchQueue(host, self._copies, self._depth)
            self._queue, self._kept = weakref.ref(queue), queue if is_its_own else None
        return partial(self._take, queue)

    def _take(self, queue: PrefetchQueue) -> Any:
        """Return the pass's next batch, and record the source's state after it."""
        delivery = queue.take()
        error = delivery.error
        if error is not None and not isinstance(error, StopIteration):
            raise error
        batch, state = delivery.batch
        if queue is self._current:
            self._state = state
        if error is not None:
            raise StopIteration
        return batch

    def _abandon(self, what: str) -> None:
        if (queue := self._current) is not None:
            queue.abandon(RuntimeError(f"this iterator was ended by {what}; begin a new one"))
        self._queue = self._kept = self._state = None

    @property
    def _current(self) -> PrefetchQueue | None:
        return None if self._queue is None else self._queue()

    def __repr__(self) -> str:
        return f"<DevicePrefetcher of {type(self._source).__name__} to {self.device}, {self._current or 'no pass'}>"


# What follows refers to the source, not to the prefetcher. A cycle would keep the source's processes alive.


class _HostPass:
    """A pass over the source. A delivery's batch is the source's batch, the source's state after it and, until it is
    moved, its key; None: the pass derives it from the delivery's number.

    The source may write all its batches into the same memory. So it isn't asked for the next batch before the copies of
    the last one are over. Tensors of the source that are on the device already are copied on the loop's stream.
    """

    def __init__(
        self, source: Any, batches: Iterator[Any], copies: CopiesInFlight, target: Target, seed: int, epoch: int
    ) -> None:
        self._source = source
        self._batches = batches
        self._copies = copies
        self._target = target
        self._seed = seed
        self._epoch = epoch
        self._rank = expected_ranks(None).rank
        self._num_pulled = 0

    def is_ready(self) -> bool:
        """Return True: nothing tells whether the source would block."""
        return True

    def take(self) -> Delivery:
        """Return the next batch. Its error is a StopIteration at the source's end."""
        try:
            self._copies.wait()
            batch = next(self._batches)
        except StopIteration:
            return Delivery(batch=(None, _snapshot(self._source)), error=StopIteration())
        except Exception as error:
            return Delivery(error=error)
        # A source that knows its place in the run must be asked now.
        key = self._source.device_key() if hasattr(self._source, "device_key") else None
        pulled = Delivery(batch=(batch, _snapshot(self._source), key), number=self._num_pulled)
        self._num_pulled += 1
        return pulled

    def move(self, delivery: Delivery, transfer: Transfer) -> Any:
        """Return the batch on the device. It shares no memory with the source."""
        batch, state, _ = delivery.batch
        try:
            return self._target.move(batch, transfer), state
        except StopIteration as stop:
            raise RuntimeError("to_device raised StopIteration, which would end the pass early") from stop

    def key_of(self, delivery: Delivery) -> int:
        """Return the key of a batch that was pulled."""
        key: int | None = delivery.batch[2]
        if key is not None:
            return key
        return derive_key(self._seed, Purpose.DEVICE.value, self._epoch, delivery.number, self._rank)


def _snapshot(source: Any) -> Any:
    """Return a copy of the source's state; {} if it has none, or the error that it raised."""
    take = getattr(source, "state_dict", None)
    try:
        return copy.deepcopy(take()) if callable(take) else {}
    except Exception as error:  # raised by state_dict(), not in the loop
        return error


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two states are equal; False if they can't be compared."""
    try:
        return bool(one == other)
    except Exception:  # arrays of several elements, for instance
        return False
