"""Samples that raise, crash or hang, a wrong length, and side effects of fetching. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from swift_loader.doctor.facts import Construction, Ended, Evidence, Failure, Habits
from swift_loader.doctor.findings import Finding, Severity, Verdict, quoted
from swift_loader.doctor.units import count_text, nbytes_text, share_text

__all__ = ["judge_faults"]

_ALONE = "Fetch that sample by itself in a script of yours, and see where it stops (python -X faulthandler shows it)."
_LONGER = (
    "If it only takes long, pass a larger --stall-seconds; else run it in a script of yours to see where it stops."
)

_PRINTS_EACH = 0.5
"""Lines printed per sample from which on samples are said to print."""


def judge_faults(evidence: Evidence) -> Verdict:
    """Return findings on all that goes wrong while the dataset is built and samples are fetched."""
    verdict = Verdict()
    verdict.findings += [_ended(one) for one in evidence.ended]
    built = evidence.construction
    if built is not None:
        verdict.findings += _of_construction(built, evidence)
    if evidence.first_failing is not None and built is not None and built.lengths:
        verdict.findings.append(_too_long(built.lengths[0], evidence))
    verdict.findings += _failures(evidence)
    if evidence.samples and not evidence.failures:
        verdict.healthy.append(f"{count_text(len(evidence.samples), 'sample')} were fetched without an error")
    if evidence.habits is not None:
        _judge_habits(verdict, evidence.habits)
    return verdict


def _ended(one: Ended) -> Finding:
    where = "" if one.index is None else f" at dataset index {one.index}"
    at = f", at {one.line}" if one.line is not None else ""
    said = f"; it printed: {one.output}" if one.output else ""
    return Finding(
        Severity.FAULT,
        "faults",
        f"The process that runs the dataset {one.how}{where}.",
        f"it was {one.doing}{at}{said}",
        _ALONE if one.index is not None else _LONGER,
        () if one.index is None else (one.index,),
    )


def _of_construction(built: Construction, evidence: Evidence) -> list[Finding]:
    if built.error:
        remedy = "Make the function or class work without arguments, then examine the dataset again."
        return [Finding(Severity.FAULT, "faults", "The dataset can't be built.", built.error, remedy)]
    if built.length_error:
        remedy = "Give the dataset __getitem__(index) and __len__(); a stream is for DataLoader, not for the doctor."
        return [Finding(Severity.FAULT, "length", "The dataset has no usable length.", built.length_error, remedy)]
    if not built.lengths[0]:
        remedy = "Check the paths and filters from which the constructor makes its list of samples."
        return [Finding(Severity.FAULT, "length", "The dataset is empty.", "len(dataset) is 0", remedy)]
    others = () if evidence.other_build is None else (evidence.other_build.num_samples,)
    lengths = (*built.lengths, *others)
    if len(set(lengths)) > 1:
        return [
            Finding(
                Severity.FAULT,
                "length",
                "The dataset's length changes.",
                f"len(dataset) gave {quoted(lengths)}",
                "Compute the length once, from data that don't change while the loader runs.",
            )
        ]
    return []


def _too_long(length: int, evidence: Evidence) -> Finding:
    assert evidence.first_failing is not None
    first = evidence.first_failing.index
    error = next((failure.error for failure in evidence.failures if failure.index >= first), "")
    return Finding(
        Severity.FAULT,
        "length",
        f"len(dataset) is wrong: it is {length:,}, but samples from index {first:,} on fail.",
        f"index {first:,} to {length - 1:,} raised {error}; index {first - 1:,} is fine",
        f"Let __len__ return {first:,}, or provide the missing samples.",
        tuple(sorted({first, length - 1})),
    )


def _failures(evidence: Evidence) -> list[Finding]:
    """Return a finding per kind of error, without those of a wrong length."""
    first = evidence.first_failing
    groups: dict[tuple[str, object], list[Failure]] = defaultdict(list)
    for failure in evidence.failures:
        if first is None or failure.index < first.index:
            groups[failure.kind, failure.line].append(failure)
    return [_failing(group, len(evidence.samples)) for group in groups.values()]


def _failing(group: Sequence[Failure], num_good: int) -> Finding:
    indices = tuple(sorted({failure.index for failure in group}))
    where = f" at {group[0].line}" if group[0].line is not None else ""
    whole = "Each sample" if not num_good else count_text(len(indices), "sample")
    return Finding(
        Severity.FAULT,
        "faults",
        f"{whole} of those looked at {'raise' if num_good and len(indices) > 1 else 'raises'} {group[0].kind}.",
        f"dataset indices {quoted(indices)}: {group[0].error}{where}",
        "Repair or remove these samples, or pass on_error='skip' or 'replace' to leave them out.",
        indices,
    )


def _judge_habits(verdict: Verdict, habits: Habits) -> None:
    if habits.changed:
        verdict.findings.append(
            Finding(
                Severity.WARNING,
                "side effects",
                "Fetching a sample changes settings of the whole process.",
                f"changed while samples were fetched: {quoted(habits.changed)}",
                "Set it back at the end of __getitem__, or set it once in the constructor.",
            )
        )
    if habits.num_lines_printed >= _PRINTS_EACH * max(1, habits.num_fetches):
        verdict.findings.append(
            Finding(
                Severity.WARNING,
                "side effects",
                "Samples print, which slows workers down and floods the terminal.",
                f"{habits.num_lines_printed:,} lines for {count_text(habits.num_fetches, 'sample')}, such as "
                f"{habits.printed!r}",
                "Remove the print, or silence the library's warnings.",
            )
        )
    if habits.requiring_grad:
        verdict.findings.append(
            Finding(
                Severity.WARNING,
                "leaves",
                "A tensor of the sample requires grad, so its graph is kept and it can't be sent as it is.",
                quoted([f"sample{path}" for path in habits.requiring_grad]),
                "Return tensor.detach(), or compute it under torch.no_grad().",
            )
        )
    if habits.views:
        verdict.findings.append(_view(habits))
    if not habits.changed and not habits.num_lines_printed:
        verdict.healthy.append("fetching samples prints nothing and changes no setting of the process")


def _view(habits: Habits) -> Finding:
    path, nbytes, whole = habits.views[0]
    return Finding(
        Severity.NOTE,
        "leaves",
        "A leaf is a writable view of a large array: a transform that works in place changes the dataset.",
        f"sample{path} has {nbytes_text(nbytes)}, {share_text(nbytes / max(1, whole))} of an array of "
        f"{nbytes_text(whole)}",
        "Return a copy, or make the array read-only with array.flags.writeable = False.",
    )
