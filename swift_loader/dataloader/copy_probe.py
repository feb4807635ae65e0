"""Finds out whether all workers give the same samples of a stream, which torch would then repeat for each worker.

Nobody can tell from a dataset whether it shares itself out: it may ask for the worker's number, have drawn its files by
rank, take its samples from a queue, or draw them at random. So the first batches of all workers are compared. Only if
the workers give the same 16 samples, or the same short stream, does each of them have a copy of everything.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from swift_loader.delivery.delivery import Delivery
from swift_loader.scheduler.work import StreamWork

__all__ = ["MIN_SAMPLES", "CopyProbe", "Resemblance", "digest_of"]

MIN_SAMPLES = 16
"""How many samples of each worker are compared. Few of them may be equal by chance, like labels."""


class Resemblance:
    """What the first batches of all workers say. Pure."""

    def __init__(self, num_workers: int, num_turns: int) -> None:
        """Begin. `num_turns` batches of each worker are compared."""
        self._num_turns = num_turns
        self._digests: list[dict[int, bytes]] = [{} for _ in range(num_workers)]
        """By worker and turn."""

    def note(self, worker_id: int, turn: int, digest: bytes) -> bool | None:
        """Take in a batch. Return whether all workers give the same; None: not known yet."""
        if turn < self._num_turns:
            self._digests[worker_id][turn] = digest
            if len({one[turn] for one in self._digests if turn in one}) > 1:
                return False
        return True if all(len(one) == self._num_turns for one in self._digests) else None

    def note_end(self) -> bool:
        """Return the verdict if there are no more batches."""
        return bool(self._digests[0]) and all(one == self._digests[0] for one in self._digests)

    def __repr__(self) -> str:
        return f"<Resemblance, batches by worker: {[len(one) for one in self._digests]}>"


class CopyProbe:
    """Holds back the first batches of an epoch until it is known whether they are copies of each other."""

    def __init__(self, num_workers: int, batch_size: int | None, note_verdict: Callable[[bool], None]) -> None:
        """Begin.

        Args:
            num_workers: How many workers there are.
            batch_size: Samples per batch. None: each is a batch of its own.
            note_verdict: Gets told whether they are copies.
        """
        self._resemblance = Resemblance(num_workers, -(-MIN_SAMPLES // (batch_size or 1)))
        self._note_verdict = note_verdict
        self._verdict: bool | None = None
        self._held: deque[Delivery] = deque()

    def next(self, take: Callable[[], Delivery]) -> Delivery | None:
        """Return the next delivery. Blocks.

        Args:
            take: Gets one from the workers.

        Returns:
            None: all workers give the same. What was held back is dropped, and the probe is of no more use.
        """
        while self._verdict is None:
            delivery = take()
            self._held.append(delivery)
            self._verdict = self._judge(delivery)
            if self._verdict is not None:
                self._note_verdict(self._verdict)
        if self._verdict:
            self._held.clear()
            return None
        return self._held.popleft() if self._held else take()

    def _judge(self, delivery: Delivery) -> bool | None:
        if delivery.is_end:
            return self._resemblance.note_end()
        if delivery.error is not None or not isinstance(delivery.work, StreamWork):
            return False
        digest = digest_of(delivery.batch)
        return digest is not None and self._resemblance.note(delivery.work.worker_id, delivery.work.turn, digest)


def digest_of(batch: Any) -> bytes | None:
    """Return a digest that equal batches share. None: there is none."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        _add(digest.update, batch)
    except Exception:  # what can't be pickled, or has another opinion of itself
        return None
    return digest.digest()


def _add(update: Callable[[Any], None], thing: Any) -> None:
    update(f"{type(thing).__module__}.{type(thing).__qualname__}".encode())
    if type(thing) is torch.Tensor and thing.layout is torch.strided:
        array = thing.detach().contiguous().view(-1).view(torch.uint8) if thing.numel() else torch.empty(0)
        update(f"{thing.dtype} {tuple(thing.shape)}".encode())
        update(array.numpy().data)
    elif type(thing) is np.ndarray and not thing.dtype.hasobject:
        update(f"{thing.dtype.str} {thing.shape}".encode())
        update(np.ascontiguousarray(thing).data)
    elif isinstance(thing, (list, tuple)):
        update(str(len(thing)).encode())
        for part in thing:
            _add(update, part)
    elif isinstance(thing, dict):
        update(str(len(thing)).encode())
        for key, value in thing.items():
            _add(update, key)
            _add(update, value)
    else:
        update(pickle.dumps(thing))
