"""What will grow in workers. Pure.

Forked workers share the pages of the dataset until they write to them. Reading a Python object writes: it counts the
reference in the object's header. So each worker ends with its own copy of all Python objects that it has read. The data
of arrays isn't affected.
"""

from __future__ import annotations

from swift_loader.doctor.facts import Container, Evidence, Growth
from swift_loader.doctor.findings import Finding, Severity, Verdict, quoted
from swift_loader.doctor.units import nbytes_text

__all__ = ["judge_memory"]

_LARGE_NBYTES = 16 << 20
"""Containers from this size on are reported. A worker takes about 10 times as much anyway."""

_GROWS_SHARE = 0.5
"""A container that gets so many items per sample grows with the samples."""


def judge_memory(evidence: Evidence, num_workers: int) -> Verdict:
    """Return findings on containers of Python objects: large ones, and ones that grow."""
    verdict = Verdict()
    if evidence.construction is None or evidence.construction.error:
        return verdict
    large = [container for container in evidence.containers if container.nbytes >= _LARGE_NBYTES]
    verdict.findings += [_copied(container, num_workers) for container in large]
    if not large:
        total = sum(container.nbytes for container in evidence.containers)
        verdict.healthy.append(f"it holds {nbytes_text(total)} of Python objects, so workers stay small")
    growing = [growth for growth in evidence.growths if _grows(growth, len(evidence.samples))]
    if growing:
        verdict.findings.append(_growing(growing, len(evidence.samples)))
    return verdict


def _copied(container: Container, num_workers: int) -> Finding:
    total = nbytes_text(container.nbytes * num_workers)
    return Finding(
        Severity.WARNING,
        "memory",
        f"dataset{container.path} will be copied into each worker, because reading a Python object changes its "
        f"reference count.",
        f"a {container.kind} of {container.num_objects:,} Python objects, about {nbytes_text(container.nbytes)}: "
        f"{total} in {num_workers} workers",
        "Keep it as a NumPy array, a pyarrow array, or one bytes object with an array of offsets: workers share these.",
    )


def _grows(growth: Growth, num_samples: int) -> bool:
    return growth.after - growth.before >= max(2, _GROWS_SHARE * num_samples)


def _growing(growths: list[Growth], num_samples: int) -> Finding:
    paths = [
        f"dataset{growth.path} ({growth.kind}) from {growth.before:,} to {growth.after:,} items" for growth in growths
    ]
    return Finding(
        Severity.WARNING,
        "memory",
        "The dataset grows with each sample, in each worker separately.",
        f"{quoted(paths)}, over {num_samples:,} samples",
        "Bound the cache (functools.lru_cache with maxsize), or fill it once in the constructor, before workers fork.",
    )
