"""Whether all processes of a loader have built the same dataset. No I/O; not thread-safe.

report ──► equal | SUSPECT: samples differ, the process is asked why ──► equal after all | an error that names it
                 | an error that names length or hash seed
"""

from __future__ import annotations

from swift_loader.errors import DatasetMismatch
from swift_loader.transport.reports import BuildReport, Verdict

__all__ = ["Builds", "settle"]

_MUST_NOT_CHANGE = (
    "All processes of a loader must build the same one, else samples would be lost and others come twice. "
)

_LENGTH_HINT = (
    "What it lists or reads must not change while the loader runs: list it once, and pass the list in dataset_kwargs; "
    "a random choice must be made by a generator with a fixed seed"
)

_HINTS = {
    Verdict.RANDOM: "its constructor gives another dataset each time: it draws from a generator that isn't keyed, such "
    "as numpy.random.default_rng(), random.Random(), os.urandom, uuid or the time. Give that a fixed seed, or use "
    "random, numpy.random or torch's default generator, which are seeded for it",
    Verdict.UNKNOWN: "either its constructor draws from a generator that isn't keyed, such as "
    "numpy.random.default_rng(), random.Random(), os.urandom, uuid or the time, or a file or something else that it "
    "reads has changed",
    Verdict.CHANGED: "length, hash seed, working directory and environment are the same, so a file or something else "
    "that it reads has changed. Nothing that the dataset is made of may change while the loader runs",
}

_OFF = ". validate=False turns off this check of samples"


class Builds:
    """What the processes have reported so far."""

    def __init__(self) -> None:
        self._first: BuildReport | None = None
        self._checksums: dict[int, int] = {}
        """By dataset index: of the first process that told one."""

    def compare(self, report: BuildReport, who: str) -> list[int]:
        """Take a report; return the dataset indices of the samples that differ from those of an earlier one.

        Raises:
            DatasetMismatch: It is another dataset for certain.
        """
        first = self._first = self._first or report
        if report.num_samples != first.num_samples:
            raise DatasetMismatch(
                f"{who} built a dataset of {report.num_samples} samples, but the first one has {first.num_samples}. "
                f"{_MUST_NOT_CHANGE}{_LENGTH_HINT}"
            )
        if report.hash_of_text != first.hash_of_text:
            raise DatasetMismatch(
                f"{who} built a dataset with another hash seed than the first one had: sets of strings are in another "
                f"order there. {_MUST_NOT_CHANGE}Set PYTHONHASHSEED before the trainer starts"
            )
        return [
            index for index, checksum in report.checksums if self._checksums.setdefault(index, checksum) != checksum
        ]

    def __repr__(self) -> str:
        return f"<Builds of {'nothing' if self._first is None else f'{self._first.num_samples} samples'}>"


def settle(differing: list[int], verdicts: dict[int, Verdict], who: str) -> None:
    """Decide about samples that differ, given what the process found out about them.

    Raises:
        DatasetMismatch: At least one of them shows that the dataset is another one.
    """
    for index in differing:
        hint = _HINTS.get(verdicts.get(index, Verdict.UNSTABLE))
        if hint is not None:
            raise DatasetMismatch(
                f"{who} built a dataset whose sample at dataset index {index} differs from that of the first one: "
                f"{hint}{_OFF}"
            )
