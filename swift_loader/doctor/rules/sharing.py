"""What keeps workers from sharing the dataset, and what can't be sent to them. Pure."""

from __future__ import annotations

from swift_loader.doctor.facts import Construction, Evidence
from swift_loader.doctor.findings import Finding, Severity, Verdict, quoted

__all__ = ["judge_sharing"]

_OPEN_LATER = (
    "Open it in __getitem__ when it is first needed, not in the constructor: then workers share the dataset's memory."
)


def judge_sharing(evidence: Evidence) -> Verdict:
    """Return findings on open files, threads and the like, and on parts that can't be serialised."""
    verdict, built = Verdict(), evidence.construction
    if built is None or built.error:
        return verdict
    if built.hazards or built.holders:
        verdict.findings.append(_not_shared(built))
    elif built.library_threads:
        verdict.findings.append(_threads(built))
    else:
        verdict.healthy.append("building it leaves no open file, socket or thread: workers share one dataset")
    if built.unsendable is not None:
        verdict.findings.append(_unsendable(built))
    else:
        verdict.healthy.append("it can be serialised, so it can be passed as an instance, too")
    return verdict


def _not_shared(built: Construction) -> Finding:
    held = [f"dataset{holder.path} is {holder.what} ({holder.kind})" for holder in built.holders]
    evidence = "; ".join(filter(None, [quoted(held), built.hazards]))
    return Finding(
        Severity.WARNING,
        "sharing",
        "Workers can't share the dataset: each one builds its own, which takes time and memory.",
        evidence,
        _OPEN_LATER,
    )


def _threads(built: Construction) -> Finding:
    return Finding(
        Severity.NOTE,
        "sharing",
        "A library keeps threads running, so each worker is a fresh interpreter with its own dataset.",
        f"threads: {quoted(built.library_threads)}",
        "Nothing, if the dataset is small and workers start fast enough; else map its data from a file (numpy.memmap, "
        "Arrow), which processes share.",
    )


def _unsendable(built: Construction) -> Finding:
    part = built.unsendable
    assert part is not None
    path = f"dataset{part.path}"
    return Finding(
        Severity.WARNING,
        "sharing",
        f"The dataset can't be sent to workers as an instance, because of {path}.",
        f"{path} is a {part.kind}: {part.error}",
        "Pass the function or class that makes it (dataset_class=) instead of an instance, or create that part lazily.",
    )
