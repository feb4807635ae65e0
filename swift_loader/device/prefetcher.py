"""Batches of any iterable on the device, ahead of the loop. All of it runs in the loop's thread.

    the source ──next──► host batch ──copy on a side stream──► ahead, `depth` of them ──► the loop

A batch is asked for before the one in front of it is handed out, as there is nobody else to ask for it; the work that
the loop queues on a GPU goes on meanwhile. A SwiftLoader needs none of this: `loader.start(device=...)` takes what is
ready and never waits to get ahead.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from swift_loader.config import check_integer
from swift_loader.device.copies import Copies
from swift_loader.device.destination import Move, default_device, device_of, mover
from swift_loader.device.keys import keyed_by
from swift_loader.device.lookahead import End, Lookahead
from swift_loader.device.streams import copy_stream
from swift_loader.device.transfer import Transfer
from swift_loader.errors import StateMismatch
from swift_loader.permutation import Purpose, derive_key
from swift_loader.placement import expected_placement

if TYPE_CHECKING:
    from types import TracebackType

    import torch

__all__ = ["DevicePrefetcher"]


class DevicePrefetcher:
    """Moves the batches of an iterable to a device, ahead of the loop.

    Of any iterable: a torch DataLoader, a list, a generator, a loader of FFCV or DALI. Each `iter` begins a pass over
    the source; if the source is its own iterator, as a generator is, it goes on with what is left, and nothing that was
    moved ahead is lost.

    `len`, `set_epoch`, `state_dict`, `load_state_dict` and `reset` are the source's. A state is that of the batch the
    loop was given last, not of the one the source gave last: the source is asked for one after each batch.
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
        """Get ready; takes nothing from the source yet.

        Args:
            iterable: The source.
            device: Where to; by default the current accelerator, else the CPU.
            to_device: `to_device(batch, device)` moves a batch instead of the default, once; what it does on the
                current stream runs beside the loop's work. Random numbers it draws can be keyed by `batch_key()`.
            dtype: What floating-point tensors are converted to on the device.
            max_nb_batch_on_device: Batches on the device ahead of the loop.
            seed: Base of `batch_key()`, which counts epochs and batches from where this prefetcher began; by default
                that of torch's generator, `torch.initial_seed()`.

        Raises:
            TypeError: An argument of the wrong type.
            ValueError: One out of its range.
        """
        if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
            raise TypeError(f"a {type(iterable).__name__} can't be iterated over; give an iterable of batches")
        self.device = default_device() if device is None else device_of(device)
        self._source = iterable
        self._move = mover(self.device, to_device, dtype)
        self._depth = check_integer("max_nb_batch_on_device", max_nb_batch_on_device, 1)
        self._seed = None if seed is None else check_integer("seed", seed, 0)
        self._copies: Copies | None = None
        """Once there is something to copy."""
        self._close_copies: Callable[[], object] = _nothing
        self._current: Callable[[], Lookahead | None] = _nothing
        """Of the pass that began last, while its iterator lives."""
        self._kept: Lookahead | None = None
        """The same, for a source that is its own iterator: another pass goes on with it."""
        self._next_epoch = 0
        self._state: Any = None
        """Of the source, after the batch that the loop was given last."""

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over a pass, which begins with its first `next`. After an error, each `next` raises it."""
        return _Pass(self)

    def __len__(self) -> int:
        """The source's length; a TypeError if it has none."""
        return len(self._source)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next pass is: of the source, or of its sampler, whichever takes it."""
        self._next_epoch = check_integer("epoch", epoch, 0)
        sampler, batch_sampler = getattr(self._source, "sampler", None), getattr(self._source, "batch_sampler", None)
        for taker in (self._source, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
            if callable(getattr(taker, "set_epoch", None)):
                before = _snapshot(self._source)
                taker.set_epoch(epoch)  # type: ignore[union-attr]
                if not _is_equal(_snapshot(self._source), before):
                    self._state = None  # the epoch is part of it
                return

    def state_dict(self) -> Any:
        """Return the source's state as it was after the batch that the loop was given last; {} if it has none.

        The source's is taken after each of its batches, since it can't be had later. If it raises, so does this.
        """
        state = _snapshot(self._source) if self._state is None else self._state
        if isinstance(state, Exception):
            raise state
        return copy.deepcopy(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the source go on where this state was taken, with the next pass; an iterator in use can't go on.

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
        """Reset the source, as DALI's iterators want it between passes; what was moved ahead is dropped.

        Raises:
            TypeError: The source has no `reset()`.
        """
        reset = getattr(self._source, "reset", None)
        if not callable(reset):
            raise TypeError(f"a {type(self._source).__name__} has no reset(); begin a new pass with iter()")
        reset()
        self._abandon("reset()")

    @property
    def source(self) -> Any:
        """The iterable that the batches are of."""
        return self._source

    @property
    def dataset(self) -> Any:
        """The source's."""
        return self._source.dataset  # type: ignore[attr-defined]

    @property
    def sampler(self) -> Any:
        """The source's."""
        return self._source.sampler  # type: ignore[attr-defined]

    @property
    def batch_sampler(self) -> Any:
        """The source's."""
        return self._source.batch_sampler  # type: ignore[attr-defined]

    @property
    def batch_size(self) -> Any:
        """The source's."""
        return self._source.batch_size  # type: ignore[attr-defined]

    def close(self) -> None:
        """Drop what was moved ahead, and wait for the copies under way. The source stays as it is. Idempotent."""
        self._abandon("close()")
        self._close_copies()
        self._copies = None

    def __enter__(self) -> DevicePrefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def open_pass(self) -> Lookahead:
        """Begin a pass over the source, or go on with it if the source can't begin one. Called by the iterator."""
        batches = iter(self._source)
        is_its_own = batches is self._source
        if is_its_own and self._kept is not None and not self._kept.is_over:
            return self._kept
        if self._copies is None:
            self._copies = Copies(copy_stream(self.device), self._depth)
            self._close_copies = weakref.finalize(self, self._copies.close)
        self._copies.catch_up()
        self._state = _snapshot(self._source) or None
        move = partial(_move_keyed, self._move, self._make_key(self._next_epoch))
        ahead = Lookahead(batches, move, partial(_snapshot, self._source), self._copies, self._depth)
        self._current, self._kept = weakref.ref(ahead), ahead if is_its_own else None
        self._next_epoch += 1
        return ahead

    def note_state(self, ahead: Lookahead, state: Any) -> None:
        """Take note of the source's state at what the loop is given now. Called by the iterator."""
        if ahead is self._current():
            self._state = state

    def _make_key(self, epoch: int) -> Callable[[int], int]:
        """Return what gives the key of each step of a pass."""
        import torch

        seed, rank = torch.initial_seed() if self._seed is None else self._seed, expected_placement(None).rank
        return lambda step: derive_key(seed, Purpose.DEVICE.value, epoch, step, rank)

    def _abandon(self, what: str) -> None:
        ahead = self._current()
        if ahead is not None:
            ahead.abandon(what)
        self._current, self._kept, self._state = _nothing, None, None

    def __repr__(self) -> str:
        return f"<DevicePrefetcher of {type(self._source).__name__} to {self.device}, {self._current() or 'no pass'}>"


# These know the source and not the prefetcher, which has the pass: a cycle would keep the source's processes alive.


def _snapshot(source: Any) -> Any:
    """Return the source's state, which nothing changes any more; {} if it has none, or why it can't be had now."""
    take = getattr(source, "state_dict", None)
    try:
        return copy.deepcopy(take()) if callable(take) else {}
    except Exception as error:  # for whoever asks for the state, not for the loop
        return error


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two states are the same, as far as that can be told."""
    try:
        return bool(one == other)
    except Exception:  # arrays of several elements, for instance
        return False


def _nothing() -> None:
    """Stand for a reference to what isn't there."""


def _move_keyed(move: Move, key: Callable[[int], int], step: int, batch: Any, transfer: Transfer) -> Any:
    with keyed_by(partial(key, step)):
        return move(batch, transfer)


class _Pass:
    """What `iter(prefetcher)` returns."""

    def __init__(self, owner: DevicePrefetcher) -> None:
        self._owner = owner
        self._ahead: Lookahead | None = None

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        if self._ahead is None:
            self._ahead = self._owner.open_pass()
        taken = self._ahead.take()
        self._owner.note_state(self._ahead, taken.state)
        if isinstance(taken, End):
            raise StopIteration
        return taken.issued.batch
