"""For your own tests: checks that a run over your dataset can be stopped anywhere and resumes exactly, and starts
workers as on another system.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from swift_loader.batch.digests import as_array, digest_of, leaves_of
from swift_loader.batch.tree import parts
from swift_loader.executors import processes

if TYPE_CHECKING:
    from swift_loader.dataloader.dataloader import DataLoader
    from swift_loader.loader import SwiftLoader
    from swift_loader.pipeline import Pipeline

    Loader = SwiftLoader | DataLoader[Any] | Pipeline[Any]

_ADVICE = (
    "A sample must depend on its index, the seed and the epoch alone. Draw from random, numpy.random, torch's default "
    "generator or swift_loader.sample_rng(), not from a generator that the dataset or a transform holds. Keep "
    "nothing from one sample to the next. Give a DataLoader seed=, which determines the order and the draws"
)


@contextmanager
def torch_workers() -> Iterator[None]:
    """Have torch's DataLoader start the workers of all loaders, as on macOS and Windows, until the end of the block."""
    before, processes.PLATFORM = processes.PLATFORM, "darwin"
    try:
        yield
    finally:
        processes.PLATFORM = before


@dataclass(slots=True)
class _Seen:
    """A batch that a loop got."""

    names: tuple[str, str]
    """What an index is called, and several."""
    indices: list[int]
    """Of the dataset. Where the loader doesn't tell them: what number of the run each sample is."""
    digests: dict[tuple[str, int | None], bytes]
    """By the path of a part, and the sample's position in the batch; None if the part doesn't belong to one sample."""
    state: dict[str, Any]
    """The loader's state after this batch."""
    is_last: bool = False
    """Whether it is the last one of an epoch."""


def assert_resume_exact(
    make_loader: Callable[[], Loader],
    *,
    resume_with: Callable[[], Loader] | None = None,
    num_batches: int = 40,
    num_cuts: int = 5,
) -> None:
    """Stop a run after some batches, resume it in a new loader, and compare every byte with a run without a stop.

    Args:
        make_loader: Returns a new loader that hasn't been started, each time with the same options: a `SwiftLoader`, a
            `Pipeline`, or a `DataLoader` with `seed`. The test checks its dataset and transforms. Use some workers, and
            so few samples that `num_batches` crosses an epoch's end.
        resume_with: Returns the loaders that resume, if these need other options, such as another `batch_size`. Then
            only the parts of a batch that have an entry per sample are compared, sample by sample.
        num_batches: Length of the run in batches, across epochs; at least 2.
        num_cuts: Number of positions at which the run is stopped, at least 1. The first end of an epoch is added.

    Raises:
        AssertionError: The runs differ. The message names the first dataset index and part of the batch that differ,
            and what to look for. Only a `SwiftLoader` tells indices. The samples of others are counted from the
            beginning of the run: as many for each batch as it, or else its first array, has entries.
        ValueError: `make_loader` returns the same loader twice, or a loader without batches; or `num_batches` or
            `num_cuts` is too small.
    """
    if num_batches <= 1 or num_cuts < 1:
        raise ValueError(
            f"num_batches={num_batches} and num_cuts={num_cuts} leave nothing to compare; pass num_batches >= 2 and "
            f"num_cuts >= 1"
        )
    first = make_loader()
    states: list[dict[str, Any]] = [first.state_dict()]
    reference = _run(first, None, num_batches)
    states += [seen.state for seen in reference]
    again = make_loader()
    if again is first:
        raise ValueError("make_loader returned the same loader twice; it must make a new one each time")
    _compare(reference, _run(again, states[0], num_batches), "when it is simply run again, without being stopped")
    for cut in _cuts(reference, num_cuts):
        rest, how = reference[cut:], f"after being stopped at batch {cut}"
        done, left = (sum(len(seen.indices) for seen in part) for part in (reference[:cut], rest))
        if resume_with is None:
            _compare(rest, _run(make_loader(), states[cut], len(rest), done), how)
        else:
            _compare_samples(rest, _run(resume_with(), states[cut], left, done, in_samples=True), how)


def _cuts(reference: list[_Seen], count: int) -> list[int]:
    """Return the numbers of batches after which to stop: evenly spaced, and at the first end of an epoch."""
    spread = {round(number) for number in np.linspace(1, len(reference) - 1, count)} if len(reference) > 1 else set()
    ends = [number for number, seen in enumerate(reference, 1) if seen.is_last]
    return sorted(spread | {number for number in ends[:1] if number < len(reference)})


def _run(loader: Any, state: Any, length: int, done: int = 0, *, in_samples: bool = False) -> list[_Seen]:
    """Return the batches of a loader from a state on: `length` batches, or enough for `length` samples.

    `done`: samples of the run before it.
    """
    seen: list[_Seen] = []
    left, num_empty = length, 0
    with loader if hasattr(loader, "__exit__") else nullcontext():
        if state is not None:
            loader.load_state_dict(state)
        while left > 0:
            before = len(seen)
            for batch in loader:
                names, indices = _indices_of(loader, batch, done)
                digests = dict(_digests(batch, "batch", None, len(indices)))
                seen.append(_Seen(names, indices, digests, loader.state_dict()))
                done += len(indices)
                left -= len(indices) if in_samples else 1
                if left <= 0:
                    break
            else:
                num_empty = num_empty + 1 if len(seen) == before else 0
                if num_empty > 1:  # a single empty pass may be the rest of an epoch
                    raise ValueError("the loader has no batches; use a dataset with enough samples for a batch")
                if seen:
                    seen[-1].is_last = True
    return seen


def _indices_of(loader: Any, batch: Any, done: int) -> tuple[tuple[str, str], list[int]]:
    """Return what identifies the samples of a batch, and what that is called."""
    if hasattr(loader, "batch_indices"):
        return ("dataset index", "dataset indices"), loader.batch_indices.tolist()
    is_list = isinstance(batch, list) and len(set(map(type, batch))) == 1 and as_array(batch[0]) is None
    arrays = (as_array(leaf) for _, leaf in leaves_of(batch))
    num_samples = len(batch) if is_list else next((len(one) for one in arrays if one is not None and one.ndim), 1)
    return ("sample", "samples"), list(range(done, done + num_samples))


def _digests(
    part: Any, path: str, position: int | None, num_samples: int
) -> Iterator[tuple[tuple[str, int | None], bytes]]:
    """Yield the digests of all leaves. An array or list with an entry per sample gets one per sample."""
    array = as_array(part)
    if array is not None and position is None and array.ndim and len(array) == num_samples:
        yield from (((path, number), digest_of(row)) for number, row in enumerate(array))
        return
    inside = [] if array is not None or isinstance(part, (set, frozenset)) else list(parts(part))
    if not inside:
        yield (path, position), digest_of(part)
    by_sample = position is None and isinstance(part, list) and len(part) == num_samples
    for number, (step, child) in enumerate(inside):
        yield from _digests(child, path if by_sample else path + step, number if by_sample else position, num_samples)


def _compare(reference: list[_Seen], resumed: list[_Seen], how: str) -> None:
    """Compare batch by batch."""
    for expected, found in zip(reference, resumed, strict=True):
        name, names = expected.names
        assert found.indices == expected.indices, (
            f"{how}, a batch consists of the {names} {found.indices} instead of {expected.indices}. This is a bug in "
            f"swift_loader, unless make_loader passes different options from call to call"
        )
        assert found.digests.keys() == expected.digests.keys(), (
            f"{how}, the batch of the {names} {expected.indices} has another structure. {_ADVICE}"
        )
        for (path, position), digest in expected.digests.items():
            which = f"{names} {expected.indices}" if position is None else f"{name} {expected.indices[position]}"
            assert found.digests[path, position] == digest, f"{how}, the run differs at {which}, in {path}. {_ADVICE}"


def _compare_samples(reference: list[_Seen], resumed: list[_Seen], how: str) -> None:
    """Compare sample by sample, across batches of different sizes."""
    name = reference[0].names[0]
    pairs = zip(_samples(reference), _samples(resumed), strict=False)  # the last batch may have more samples
    for (index, expected), (found_index, found) in pairs:
        assert found_index == index, f"{how}, {name} {found_index} comes instead of {index}"
        for path, digest in expected.items():
            assert found.get(path) == digest, f"{how}, the run differs at {name} {index}, in {path}. {_ADVICE}"


def _samples(batches: list[_Seen]) -> Iterator[tuple[int, dict[str, bytes]]]:
    """Yield the dataset index and the digests, by path, of each sample."""
    for seen in batches:
        for position, index in enumerate(seen.indices):
            yield index, {path: digest for (path, at), digest in seen.digests.items() if at == position}
