"""Whether samples can be collated: leaves that differ from sample to sample, and dtypes that surprise. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from swift_loader.doctor.facts import Evidence, Leaf, Sample
from swift_loader.doctor.findings import Finding, Severity, Verdict, quoted

__all__ = ["Ragged", "judge_leaves", "ragged_leaves"]

_FEW = 3
"""How many kinds of a leaf are shown."""

_ARRAYS = ("numpy.ndarray", "torch.Tensor")


@dataclass(frozen=True, slots=True)
class Ragged:
    """A leaf that isn't alike in all samples."""

    path: str
    forms: tuple[tuple[str, int, int], ...]
    """(form such as `float32 (3, 4)`, number of samples, the first index), the most frequent first."""

    @property
    def usual(self) -> str:
        """The most frequent form."""
        return self.forms[0][0]


def ragged_leaves(samples: Sequence[Sample]) -> tuple[Ragged, ...]:
    """Return the leaves whose dtype or shape differs between samples, or that some samples lack."""
    forms: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        for leaf in sample.layout:
            forms[leaf.path][_form(leaf)].append(sample.index)
    for path, seen in forms.items():
        if sum(map(len, seen.values())) < len(samples):
            having = {index for indices in seen.values() for index in indices}
            forms[path]["missing"] = [sample.index for sample in samples if sample.index not in having] or [-1]
    return tuple(
        Ragged(
            path, tuple(sorted(((form, len(have), min(have)) for form, have in seen.items()), key=lambda one: -one[1]))
        )
        for path, seen in forms.items()
        if len(seen) > 1
    )


def _form(leaf: Leaf) -> str:
    return f"{leaf.dtype} {leaf.shape}" if leaf.shape is not None else leaf.kind


def judge_leaves(evidence: Evidence) -> Verdict:
    """Return findings on leaves that can't be collated, and on dtypes."""
    verdict = Verdict()
    if not evidence.samples:
        return verdict
    ragged = ragged_leaves(evidence.samples)
    error = evidence.batches.error if evidence.batches is not None else ""
    if ragged and (error or _breaks_collate(ragged)):
        verdict.findings.append(_ragged(ragged, error, is_collated=bool(evidence.batches and evidence.batches.took_s)))
    elif error:
        verdict.findings.append(_not_collated(error, evidence.samples[0]))
    else:
        verdict.healthy.append("all samples have the same leaves, with the same dtypes and shapes")
    verdict.findings += _dtypes(evidence.samples)
    return verdict


def _breaks_collate(ragged: Sequence[Ragged]) -> bool:
    """Return whether a form is that of an array, or missing: lists and text of any length are no trouble."""
    return any("(" in form or form == "missing" for one in ragged for form, _, _ in one.forms)


def _ragged(ragged: Sequence[Ragged], error: str, *, is_collated: bool) -> Finding:
    shown = [f"sample{one.path}: {_forms(one)}" for one in ragged]
    odd = sorted({first for one in ragged for form, _, first in one.forms if form != one.usual and first >= 0})
    said = f"; collating a batch raised {error}" if error else ""
    return Finding(
        Severity.WARNING if is_collated and not error else Severity.FAULT,
        "leaves",
        f"Samples don't have the same leaves, so a default collate can't stack them: sample{ragged[0].path}.",
        f"{quoted(shown)}{said}",
        "Pad or crop to one shape in __getitem__, or pass a collate_fn that pads to the longest sample of the batch.",
        tuple(odd),
    )


def _forms(one: Ragged) -> str:
    parts = [f"{form} in {count} samples (first: index {first})" for form, count, first in one.forms[:_FEW]]
    more = len(one.forms) - _FEW
    return ", ".join(parts) + (f" and {more} more forms" if more > 0 else "")


def _not_collated(error: str, sample: Sample) -> Finding:
    leaves = quoted([f"sample{leaf.path}: {_form(leaf)}" for leaf in sample.layout])
    return Finding(
        Severity.FAULT,
        "leaves",
        "Samples can't be collated into a batch.",
        f"the collate function raised {error}; a sample is {leaves}",
        "Return arrays, tensors, numbers or containers of them from __getitem__, or pass a collate_fn.",
    )


def _dtypes(samples: Sequence[Sample]) -> list[Finding]:
    surprising = {
        leaf.path: leaf
        for sample in samples
        for leaf in sample.layout
        if leaf.kind in _ARRAYS and leaf.shape and (leaf.dtype.endswith("float64") or leaf.dtype == "object")
    }
    objects = [f"sample{path}" for path, leaf in surprising.items() if leaf.dtype == "object"]
    doubles = [f"sample{path} {leaf.shape}" for path, leaf in surprising.items() if leaf.dtype != "object"]
    found = []
    if objects:
        found.append(
            Finding(
                Severity.WARNING,
                "leaves",
                "A leaf is an array of Python objects, which is slow to send and no tensor can be made of.",
                quoted(objects),
                "Return an array of numbers, or a list.",
            )
        )
    if doubles:
        found.append(
            Finding(
                Severity.NOTE,
                "leaves",
                "A leaf is float64, twice the bytes of float32, which models usually want.",
                quoted(doubles),
                "Convert it with .astype(numpy.float32), unless the precision is needed.",
            )
        )
    return found
