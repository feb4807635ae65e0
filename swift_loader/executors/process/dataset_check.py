"""Checks that all processes of a loader built the same dataset. No I/O.

report ──► equal | suspect: samples differ, so the process is asked why ──► equal after all | an error with the reason
                 | an error that names length or hash seed
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from swift_loader.errors import DatasetMismatch
from swift_loader.transport.reports import BuildReport, Verdict

__all__ = ["DatasetCheck"]

_MUST_NOT_CHANGE = (
    "All processes of a loader must build the same one; otherwise some samples would be lost and others come twice. "
)

_LENGTH_HINT = (
    "If it lists files or other data that change while the loader runs, list them once and pass the list in "
    "dataset_kwargs. If it chooses samples at random, give its generator a fixed seed"
)

_HINTS = {
    Verdict.RANDOM: "its constructor gives another dataset each time. It uses a random source that the loader doesn't "
    "seed, such as numpy.random.default_rng(), random.Random(), os.urandom, uuid or the time. Give it a fixed seed, or "
    "use random, numpy.random or torch's default generator, which the loader seeds",
    Verdict.UNKNOWN: "either its constructor uses a random source that the loader doesn't seed, such as "
    "numpy.random.default_rng(), random.Random(), os.urandom, uuid or the time, or a file or something else that it "
    "reads has changed",
    Verdict.CHANGED: "length, hash seed, working directory and environment are the same, so a file or something else "
    "that it reads has changed. Don't change the dataset's data while the loader runs",
}

_OFF = ". validate=False turns off this check of samples"


class DatasetCheck:
    """The reports of the processes so far. Thread-safe: workers report to several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the reports."""
        self._first: BuildReport | None = None
        self._checksums: dict[int, int] = {}
        """dataset index -> checksum of the sample, from the first process that reported it"""

    def compare(self, report: BuildReport, who: str) -> list[int]:
        """Add a report. Return the dataset indices of samples that differ from those of an earlier report.

        Raises:
            DatasetMismatch: The length or the hash seed differs, so it is certainly another dataset.
        """
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
            return [
                index for index, checksum in report.checksums if self._checksums.setdefault(index, checksum) != checksum
            ]

    def settle(self, differing: Sequence[int], verdicts: Mapping[int, Verdict], who: str) -> None:
        """Decide about samples that differ, given the verdicts of the process that built them.

        Raises:
            DatasetMismatch: At least one sample shows that the datasets differ.
        """
        for index in differing:
            hint = _HINTS.get(verdicts.get(index, Verdict.UNSTABLE))
            if hint is not None:
                raise DatasetMismatch(
                    f"{who} built a dataset whose sample at dataset index {index} differs from that of the first one: "
                    f"{hint}{_OFF}"
                )

    def __repr__(self) -> str:
        return f"<DatasetCheck of {'nothing' if self._first is None else f'{self._first.num_samples} samples'}>"
