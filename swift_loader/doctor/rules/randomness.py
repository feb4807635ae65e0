"""What samples draw at random, whether it is keyed, and whether a run resumes exactly. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swift_loader.doctor.facts import MIN_RESUMED, Digests, Draws, Evidence, OtherBuild, Resumed
from swift_loader.doctor.findings import Finding, Severity, Verdict, quoted
from swift_loader.doctor.units import count_text

__all__ = ["differing", "judge_randomness"]

_USE_KEYED = (
    "Draw from swift_loader.sample_rng() in __getitem__, or from random, numpy.random or torch's default generator, "
    "which the loader seeds for each sample."
)

_NOT_THE_TIME = "Don't put the time or the process id into a sample; derive what you need from the index."

_CLOCKS = ("time.", "os.getpid")

_KEEP_NOTHING = (
    "Let a sample depend on its index and on swift_loader.sample_rng() alone: keep nothing from one sample to the next."
)


def differing(one: Mapping[int, Mapping[str, bytes]], other: Mapping[int, Mapping[str, bytes]]) -> dict[int, str]:
    """Return the indices of samples that differ, each with the path of its first leaf that differs."""
    found = {}
    for index, leaves in one.items():
        others = other.get(index)
        if others is None or leaves == others:
            continue
        paths = [path for path, digest in leaves.items() if others.get(path) != digest]
        found[index] = paths[0] if paths else ""
    return found


def judge_randomness(evidence: Evidence) -> Verdict:
    """Return findings on samples that differ although they were built with the same seeds."""
    verdict = Verdict()
    draws, other = evidence.draws, evidence.other_build
    twice = differing(evidence.digests.first, evidence.digests.again) if evidence.digests else {}
    elsewhere = differing(evidence.digests.first, other.digests) if evidence.digests and other else {}
    if twice or elsewhere:
        verdict.findings.append(_unkeyed(twice, elsewhere, draws, other))
    elif evidence.digests is not None:
        verdict.healthy.append(_equal(evidence.digests, other))
    if draws is not None:
        _judge_draws(verdict, draws, is_keyed=not twice and not elsewhere)
    if evidence.resumed is not None:
        _judge_resume(verdict, evidence.resumed)
    elif evidence.digests is not None and not evidence.ended:
        verdict.findings.append(_not_resumed(evidence))
    return verdict


def _equal(digests: Digests, other: OtherBuild | None) -> str:
    where = ", also in another process and another order" if other is not None else ""
    return f"{count_text(len(digests.first), 'sample')} built twice with the same seeds are equal{where}"


def _unkeyed(
    twice: Mapping[int, str], elsewhere: Mapping[int, str], draws: Draws | None, other: OtherBuild | None
) -> Finding:
    found = twice or elsewhere
    indices = tuple(sorted(found))
    how = "fetched twice" if twice else "fetched in another process and another order"
    paths = sorted({f"sample{path}" for path in found.values()})
    causes, remedy = _causes(indices, draws, other, in_constructor=not twice)
    return Finding(
        Severity.FAULT,
        "randomness",
        f"Samples differ when they are {how} with the same seeds, so a run can't be repeated or resumed exactly.",
        f"dataset indices {quoted(indices)}, in {quoted(paths)}; {causes}",
        remedy,
        indices,
    )


def _causes(
    indices: Sequence[int], draws: Draws | None, other: OtherBuild | None, *, in_constructor: bool
) -> tuple[str, str]:
    """Return what the samples that differ use, and the remedy."""
    held = [] if draws is None else [name for name in draws.held if set(indices) & set(draws.sources[name])]
    if held:
        return f"they draw from {quoted(held)}, which the loader doesn't seed", _USE_KEYED
    entropy = sorted({source for index in indices for source in (other.entropy.get(index, ()) if other else ())})
    if entropy:
        is_clock = all(source.startswith(_CLOCKS) for source in entropy)
        return f"they use {quoted(entropy)}", _NOT_THE_TIME if is_clock else _USE_KEYED
    if in_constructor and other is not None and other.of_constructor:
        return (
            f"the constructor uses {quoted(other.of_constructor)}",
            "Give the generator in the constructor a fixed seed: each worker must build the same dataset.",
        )
    return (
        "no random source was seen: they may depend on earlier samples (a counter, a cache), on the time, or on a "
        "generator such as random.Random() that __getitem__ makes without a seed",
        _KEEP_NOTHING,
    )


def _judge_draws(verdict: Verdict, draws: Draws, *, is_keyed: bool) -> None:
    keyed = [name for name in draws.sources if name not in draws.held]
    if keyed:
        verdict.healthy.append(f"samples draw from {quoted(keyed)}, keyed by sample")
    elif not draws.sources and is_keyed:
        verdict.healthy.append(f"{count_text(draws.num_samples, 'sample')} draw no random numbers")
    if draws.held and is_keyed:
        verdict.findings.append(
            Finding(
                Severity.WARNING,
                "randomness",
                "Samples draw from a generator that the loader doesn't seed.",
                f"{quoted(draws.held)}; the samples that were looked at were equal nevertheless",
                _USE_KEYED,
            )
        )
    if draws.reseeded:
        verdict.findings.append(
            Finding(
                Severity.WARNING,
                "randomness",
                f"__getitem__ seeds {quoted(draws.reseeded)} itself, so a sample draws the same in each epoch.",
                f"after a sample, the state of {quoted(draws.reseeded)} is the same in epochs 0 and 1",
                "Leave the seeding to the loader, which seeds by sample and epoch, or use swift_loader.sample_rng().",
            )
        )


def _not_resumed(evidence: Evidence) -> Finding:
    built = evidence.construction
    if built is not None and built.lengths and built.lengths[0] < MIN_RESUMED:
        return Finding(
            Severity.NOTE,
            "resume",
            "Whether a run resumes exactly wasn't checked: the dataset is too small.",
            f"such a run needs at least {MIN_RESUMED} samples; len(dataset) is {built.lengths[0]}",
            "Examine a dataset with more samples.",
        )
    return Finding(
        Severity.NOTE,
        "resume",
        "Whether a run resumes exactly wasn't checked: it takes too long.",
        f"such a run builds at least {MIN_RESUMED} samples 6 times; "
        f"{count_text(len(evidence.samples), 'sample')} were measured",
        "Pass a larger --seconds.",
    )


def _judge_resume(verdict: Verdict, resumed: Resumed) -> None:
    run = f"a run over {count_text(resumed.num_samples, 'sample')} with {count_text(resumed.num_workers, 'worker')}"
    if not resumed.error:
        verdict.healthy.append(f"{run}, stopped and resumed with one, gives the same bytes")
        return
    verdict.findings.append(
        Finding(
            Severity.FAULT,
            "resume",
            "A stopped run doesn't resume exactly." if resumed.is_mismatch else "The loader can't run this dataset.",
            f"{run}: {resumed.error}",
            _KEEP_NOTHING if resumed.is_mismatch else "Follow the error's advice, then examine the dataset again.",
        )
    )
