"""Samples that failed, and that the loop goes on without: what is known of them, and how many there may be.

A failure counts once the loop is given the batch that does without the sample: what is prefetched and thrown away
counts for nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swift_loader.errors import TooManyErrors
from swift_loader.notices import warn
from swift_loader.plan import BatchPlan

__all__ = ["MAX_KEPT_FAILURES", "BadSamples", "SampleFailure", "delivered_batch"]

MAX_KEPT_FAILURES = 1000
"""Of a loader; the oldest ones go first."""

_MAX_SHOWN_TEXT = 200
"""Characters of an exception's message in a warning."""


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """A sample that raised, and that its batch does without."""

    epoch: int
    step: int
    """Of the batch, in its epoch."""
    index: int
    """The dataset index."""
    exception: Exception
    """What the dataset raised: of the same type if that survives the way from the worker, else a `WorkerError`. Its
    `__cause__` is a `RemoteTraceback`, which tells worker, batch and traceback."""
    reason: str
    """The exception's type and message, as the worker saw them."""
    traceback: str
    """As the worker saw it."""
    replaced_by: int | None
    """The dataset index of the sample in its place; None if it was left out."""
    position: int
    """Its place in the batch as planned."""


def delivered_batch(planned: BatchPlan, failures: Sequence[SampleFailure]) -> BatchPlan:
    """Return what a batch consists of in which these samples failed."""
    if not failures:
        return planned
    indices, num_planned = planned.indices.copy(), len(planned.indices)
    left_out = []
    for failure in failures:
        if failure.replaced_by is None:
            left_out.append(failure.position)
        else:
            indices[failure.position] = failure.replaced_by
    first_padded = num_planned - planned.num_padding
    num_padding = planned.num_padding - sum(position >= first_padded for position in left_out)
    return BatchPlan(np.delete(indices, left_out), num_padding)


class BadSamples:
    """The failures that a loop has met. Not thread-safe: it belongs to the loop's thread."""

    def __init__(self, max_errors: float | None) -> None:
        """Begin with none.

        Args:
            max_errors: How many there may be in an epoch: an integer counts samples, a float below 1 is the fraction
                of the epoch's samples; None is no limit.
        """
        self._max_errors = max_errors
        self._kept: deque[SampleFailure] = deque(maxlen=MAX_KEPT_FAILURES)
        self._epoch = 0
        self._num_samples = 0
        self._first: SampleFailure | None = None
        self._by_type: Counter[str] = Counter()
        """Of the pass that is under way."""

    @property
    def kept(self) -> list[SampleFailure]:
        """The last ones, oldest first."""
        return list(self._kept)

    def begin(self, epoch: int, num_samples: int) -> None:
        """Count anew, for a pass through an epoch in which this rank has so many samples."""
        self._epoch = epoch
        self._num_samples = num_samples
        self._first = None
        self._by_type.clear()

    def note(self, failures: Sequence[SampleFailure]) -> None:
        """Take note of the failures of a batch that is about to be given to the loop.

        Raises:
            TooManyErrors: These are too many.
        """
        for failure in failures:
            self._kept.append(failure)
            self._first = self._first or failure
            self._by_type[failure.reason.partition(":")[0].rpartition(".")[2]] += 1
        num_failed, limit = self._by_type.total(), self._max_errors
        if limit is None:
            return
        allowed = int(limit * self._num_samples) if isinstance(limit, float) else limit
        if num_failed <= allowed:
            return
        self.begin(self._epoch, self._num_samples)  # the error says it all: no summary comes after it
        last = failures[-1]
        raise TooManyErrors(
            f"{num_failed:,} of the {self._num_samples:,} samples of epoch {self._epoch} have failed, and "
            f"max_errors={limit} allows no more than {allowed}; the last one: dataset index {last.index}. Mend what "
            f"loader.failures lists, or raise max_errors"
        ) from last.exception

    def warn(self) -> None:
        """Warn of the failures of the pass, if there were any; once.

        Raises:
            SwiftLoaderWarning: Where warnings are turned into errors.
        """
        first = self._first
        if first is None:
            return
        what = "replaced by others" if first.replaced_by is not None else "left out"
        kinds = ", ".join(f"{name} {count:,}" for name, count in self._by_type.most_common())
        reason = " ".join(first.reason.split())[:_MAX_SHOWN_TEXT]
        text = (
            f"epoch {self._epoch}: {self._by_type.total():,} of {self._num_samples:,} samples failed and were {what}: "
            f"{kinds}; the first: dataset index {first.index} ({reason}); see loader.failures"
        )
        self.begin(self._epoch, self._num_samples)
        warn(text)
