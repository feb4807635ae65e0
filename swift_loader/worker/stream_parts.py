"""Continues a stream of the `datasets` package with another number of workers than it was begun with.

Such a stream gives each worker some of its shards, by the worker's number. What a worker has left is a part: the
worker's number, of how many, and where it was. Any process can read a part if it looks like that worker meanwhile. So
the parts that are left are dealt out to however many workers there are now. Each reads its parts one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from swift_loader.worker.stream_state import forget_state, has_exact_state

__all__ = ["PartsIterator", "part_of", "parts_in", "state_of_parts"]

_KEY = "parts"


def part_of(worker_id: int, num_workers: int, state: Any, num_to_skip: int) -> dict[str, Any]:
    """Return what a worker has left, in plain types.

    Args:
        worker_id: The worker that began it.
        num_workers: How many workers there were. 0: it was the main process.
        state: The dataset's state in that worker. None: the beginning.
        num_to_skip: How many samples after that aren't wanted.
    """
    return {"worker_id": worker_id, "num_workers": num_workers, "state": state, "num_to_skip": num_to_skip}


def state_of_parts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of a `PartsIterator`."""
    return {_KEY: parts}


def parts_in(iterator_state: Any) -> list[dict[str, Any]] | None:
    """Return the parts in the state of an iterator; None if it isn't of a `PartsIterator`."""
    return iterator_state[_KEY] if isinstance(iterator_state, dict) and set(iterator_state) == {_KEY} else None


class PartsIterator:
    """The samples of some parts, one part after the other. Not thread-safe: it changes what `get_worker_info` says."""

    def __init__(self, dataset: Any, parts: list[dict[str, Any]]) -> None:
        """Begin with the first part. The dataset's state is set for each part."""
        self._dataset = dataset
        self._left = deque(parts)
        """The current part is the first."""
        self._samples: Iterator[Any] | None = None
        """Those of the current part. None: it hasn't begun."""
        self._info: Any = None
        """What `get_worker_info` answers meanwhile."""
        self._num_taken = 0
        """Samples since the state in the current part."""

    def __iter__(self) -> PartsIterator:
        return self

    def __next__(self) -> Any:
        while self._left:
            with self._seen():
                try:
                    if self._samples is None:
                        self._samples = self._begin(self._left[0])
                    sample = next(self._samples)
                except StopIteration:
                    self._left.popleft()
                    self._samples = None
                    continue
            self._num_taken += 1
            return sample
        raise StopIteration

    def _begin(self, part: dict[str, Any]) -> Iterator[Any]:
        """Begin a part. Raises StopIteration if nothing is left of it."""
        from torch.utils.data._utils import worker

        self._info = None
        if part["num_workers"]:
            self._info = worker.WorkerInfo(
                id=part["worker_id"], num_workers=part["num_workers"], seed=part["worker_id"], dataset=self._dataset
            )
        worker._worker_info = self._info  # noqa: SLF001 - torch has no other way to set it
        forget_state(self._dataset)
        if part["state"] is not None:
            self._dataset.load_state_dict(part["state"])
        samples: Iterator[Any] = iter(self._dataset)
        self._num_taken = 0
        for _ in range(part["num_to_skip"]):
            next(samples)
            self._num_taken += 1
        return samples

    @contextmanager
    def _seen(self) -> Iterator[None]:
        """Let the process look like the worker that began the current part."""
        from torch.utils.data._utils import worker

        before, worker._worker_info = worker._worker_info, self._info  # noqa: SLF001
        try:
            yield
        finally:
            worker._worker_info = before  # noqa: SLF001

    def state_dict(self) -> dict[str, Any]:
        """Return the parts that are left."""
        parts = list(self._left)
        if self._samples is not None:
            exact = has_exact_state(self._dataset)
            part = (
                {"state": self._dataset.state_dict(), "num_to_skip": 0} if exact else {"num_to_skip": self._num_taken}
            )
            parts[0] = parts[0] | part
        return state_of_parts(parts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with these parts."""
        self._left = deque(parts_in(state) or ())
        self._samples = None
