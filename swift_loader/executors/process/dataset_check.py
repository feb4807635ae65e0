"""Checks that all processes of a loader built the same dataset. No I/O.

A difference in length, hash seed or in a sample is an error that names it.
"""

from __future__ import annotations

import threading

from swift_loader.errors import DatasetMismatch
from swift_loader.transport.messages import BuildReport

_MUST_NOT_CHANGE = (
    "All processes of a loader must build the same one; otherwise some samples would be lost and others come twice. "
)

_LENGTH_HINT = (
    "If it lists files or other data that change while the loader runs, list them once and pass the list in "
    "dataset_kwargs. If it chooses samples at random, give its generator a fixed seed"
)

_SAMPLE_HINT = (
    "Either its constructor uses a random source that the loader doesn't seed, such as numpy.random.default_rng(), "
    "random.Random(), os.urandom, uuid or the time: give it a fixed seed, or use random, numpy.random or torch's "
    "default generator, which the loader seeds. Or a file or something else that it reads has changed: don't change "
    "the dataset's data while the loader runs"
)

_OFF = ". validate=False turns off this check of samples"


class DatasetCheck:
    """The reports of the processes so far. Thread-safe: workers report to several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the reports."""
        self._first: BuildReport | None = None
        self._checksums: dict[int, int] = {}
        """dataset index -> checksum of the sample, from the first process that reported it"""

    def compare(self, report: BuildReport, who: str) -> None:
        """Add a report. Raises `DatasetMismatch` if it differs from an earlier one."""
        with self._lock:
            first = self._first = self._first or report
            if report.num_samples != first.num_samples:
                raise DatasetMismatch(
                    f"{who} built a dataset of {report.num_samples} samples, but the first one has "
                    f"{first.num_samples}. {_MUST_NOT_CHANGE}{_LENGTH_HINT}"
                )
            if report.hash_of_text != first.hash_of_text:
                raise DatasetMismatch(
                    f"{who} built a dataset with another hash seed than the first one, so sets of strings have another "
                    f"order. {_MUST_NOT_CHANGE}Set PYTHONHASHSEED before the trainer starts"
                )
            for index, checksum in report.checksums:
                if self._checksums.setdefault(index, checksum) != checksum:
                    raise DatasetMismatch(
                        f"{who} built a dataset whose sample at dataset index {index} differs from that of the first "
                        f"one. {_MUST_NOT_CHANGE}{_SAMPLE_HINT}{_OFF}"
                    )

    def __repr__(self) -> str:
        return f"<DatasetCheck of {'nothing' if self._first is None else f'{self._first.num_samples} samples'}>"
