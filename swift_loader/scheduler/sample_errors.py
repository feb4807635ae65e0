"""Records the samples that failed and were skipped or replaced, and enforces `max_errors`.

A failure counts when the loop gets the sample's batch. Failures in batches that are prefetched and dropped don't count.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from swift_loader.errors import TooManyErrors, warn
from swift_loader.sampling.plan import BatchPlan

MAX_KEPT_FAILURES = 1000
"""Per loader. The oldest are dropped first."""

_MAX_SHOWN_TEXT = 200
"""Characters of an exception's message in a warning."""


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """A sample that raised, and was skipped or replaced in its batch."""

    epoch: int
    step: int
    """The batch's number in its epoch, from 0."""
    index: Any
    """The dataset index: an int. Of a DataLoader, what the sampler gave for it."""
    exception: Exception
    """What the dataset raised. It has its original type if that can be pickled, else it is a `WorkerError`. Its
    `__cause__` is a `RemoteTraceback` with worker, batch and traceback."""
    reason: str
    """The exception's type and message in the worker."""
    traceback: str = field(repr=False)
    """The traceback in the worker."""
    replaced_by: int | None
    """The dataset index of the replacement; None if the sample was left out."""
    position: int
    """The sample's position in the batch as planned, from 0."""


def delivered_batch(planned: BatchPlan, failures: Sequence[SampleFailure]) -> BatchPlan:
    """Return the indices and the padding of a batch after these samples were left out or replaced."""
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


class SampleErrors:
    """The failures in the batches that the loop got. Not thread-safe: belongs to the loop's thread."""

    def __init__(self, max_errors: float | None) -> None:
        """Start without failures.

        `max_errors`: how many samples may fail in an epoch. An integer counts samples, a float below 1 is a fraction of
        the epoch's samples, None is no limit.
        """
        self._max_errors = max_errors
        self._kept: deque[SampleFailure] = deque(maxlen=MAX_KEPT_FAILURES)
        self._epoch = 0
        self._num_samples: int | None = 0
        self._first: SampleFailure | None = None
        self._by_type: Counter[str] = Counter()
        """Failures of the current pass, by the exception's type."""
        self._noted: dict[tuple[int, int], None] = {}
        """Of which epochs and steps they were noted. After an interrupt, a batch may come again."""

    @property
    def kept(self) -> list[SampleFailure]:
        """The last `MAX_KEPT_FAILURES` failures, oldest first."""
        return list(self._kept)

    def begin(self, epoch: int, num_samples: int | None) -> None:
        """Reset the count for a pass through an epoch. `num_samples` is this rank's share of it; None: not known."""
        self._epoch = epoch
        self._num_samples = num_samples
        self._first, self._noted = None, {}
        self._by_type.clear()

    def note(self, failures: Sequence[SampleFailure]) -> None:
        """Record the failures of a batch, before the loop gets it.

        Raises `TooManyErrors` if the pass now has more than `max_errors` allows.
        """
        place = failures[0].epoch, failures[0].step
        if place not in self._noted:
            kinds = Counter(failure.reason.partition(":")[0].rpartition(".")[2] for failure in failures)
            kept, by_type = deque((*self._kept, *failures), MAX_KEPT_FAILURES), self._by_type + kinds
            first = self._first or failures[0]
            # No signal handler runs within this line.
            self._kept, self._by_type, self._first, self._noted[place] = kept, by_type, first, None
        num_failed, limit = self._by_type.total(), self._max_errors
        if limit is None:
            return
        allowed = int(limit * (self._num_samples or 0)) if isinstance(limit, float) else limit
        if num_failed <= allowed:
            return
        of_all, last = self._of_all("the "), failures[-1]
        self.begin(self._epoch, self._num_samples)  # the error is the summary, so `warn` has nothing to add
        raise TooManyErrors(
            f"{of_all} of epoch {self._epoch} have failed, and "
            f"max_errors={limit} allows no more than {allowed}; the last one has dataset index {last.index}. Fix the "
            f"samples in loader.failures, or raise max_errors"
        ) from last.exception

    def warn(self) -> None:
        """Warn once about the failures of the pass, if there are any.

        Raises `SwiftLoaderWarning` if the user's warning filter turns warnings into errors.
        """
        first = self._first
        if first is None:
            return
        what = "replaced by others" if first.replaced_by is not None else "left out"
        kinds = ", ".join(f"{name} {count:,}" for name, count in self._by_type.most_common())
        reason = " ".join(first.reason.split())[:_MAX_SHOWN_TEXT]
        text = (
            f"epoch {self._epoch}: {self._of_all()} failed and were {what}: "
            f"{kinds}; the first: dataset index {first.index} ({reason}); see loader.failures"
        )
        self.begin(self._epoch, self._num_samples)
        warn(text)

    def _of_all(self, the: str = "") -> str:
        num_failed, num_samples = self._by_type.total(), self._num_samples
        return f"{num_failed:,} {'' if num_samples is None else f'of {the}{num_samples:,} '}samples"
