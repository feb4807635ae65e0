"""For your own tests: proves that a run over your dataset can be stopped anywhere and goes on exactly."""

from __future__ import annotations

import hashlib
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.transport.walk import parts

if TYPE_CHECKING:
    from swift_loader.loader import SwiftLoader

__all__ = ["assert_resume_exact"]

_ADVICE = (
    "A sample must depend on its index, the seed and the epoch alone: draw from random, numpy.random, torch's default "
    "generator or swift_loader.sample_rng(), not from a generator that the dataset or a transform holds, and keep "
    "nothing from one sample to the next"
)


@dataclass(frozen=True, slots=True)
class _Mark:
    """A part of a batch, as far as it is compared."""

    path: str
    place: int | None
    """Of the sample in the batch; None if the part isn't one sample's."""
    digest: bytes


@dataclass(frozen=True, slots=True)
class _Seen:
    """A batch that a loop was given."""

    indices: list[int]
    marks: list[_Mark]
    state: dict[str, int]
    """As saved after it."""


def assert_resume_exact(make_loader: Callable[[], SwiftLoader], *, num_batches: int = 40, num_cuts: int = 5) -> None:
    """Stop a run after some batches, go on in a new loader, and compare every byte with a run that isn't stopped.

    Args:
        make_loader: Returns a new loader, each time with the same options, not started. Its dataset and transforms are
            what is tested. Use some workers, and few enough samples for `num_batches` to go beyond an epoch's end.
        num_batches: How long the run is, in batches, over the ends of epochs.
        num_cuts: After how many different numbers of batches it is stopped.

    Raises:
        AssertionError: The runs differ; names the first dataset index and the part of the batch that do, and says what
            to look for.
        ValueError: `make_loader` returns the same loader twice, or one without batches.
    """
    first = make_loader()
    begin = _through_json(first.state_dict())
    reference = _run(first, None, num_batches)
    for cut in [0, *_cuts(reference, num_cuts)]:
        again = make_loader()
        if again is first:
            raise ValueError("make_loader returned the same loader twice; it must make a new one each time")
        state = reference[cut - 1].state if cut else begin
        resumed = _run(again, state, num_batches - cut)
        _compare(reference[cut:], resumed, cut)


def _cuts(reference: list[_Seen], count: int) -> list[int]:
    """Return after how many batches to stop: spread evenly, and at the first end of an epoch."""
    spread = {round(number) for number in np.linspace(1, len(reference) - 1, count)} if len(reference) > 1 else set()
    ends = [number for number, seen in enumerate(reference, 1) if seen.state["position"] == seen.state["num_samples"]]
    return sorted(spread | {number for number in ends[:1] if number < len(reference)})


def _run(loader: SwiftLoader, state: dict[str, int] | None, num_batches: int) -> list[_Seen]:
    """Return what a loader gives, from a state on."""
    seen: list[_Seen] = []
    with loader:
        if state is not None:
            loader.load_state_dict(state)
        num_empty = 0
        while len(seen) < num_batches:
            before = len(seen)
            for batch in loader:
                indices = loader.batch_indices.tolist()
                marks = list(_marks(batch, "batch", None, len(indices)))
                seen.append(_Seen(indices, marks, _through_json(loader.state_dict())))
                if len(seen) == num_batches:
                    break
            num_empty = num_empty + 1 if len(seen) == before else 0
            if num_empty > 1:  # one may be the rest of an epoch
                raise ValueError("the loader has no batches; give it a dataset with some samples")
    return seen


def _through_json(state: dict[str, int]) -> dict[str, int]:
    loaded: dict[str, int] = json.loads(json.dumps(state))
    return loaded


def _marks(part: Any, path: str, place: int | None, num_samples: int) -> Iterator[_Mark]:
    """Yield the marks of all leaves; arrays and lists with an entry per sample are marked sample by sample."""
    array = _as_array(part)
    if array is not None and not array.dtype.hasobject:
        if place is None and array.ndim and len(array) == num_samples:
            for number, row in enumerate(array):
                yield _Mark(path, number, _digest(f"{row.dtype}{row.shape}".encode() + row.tobytes()))
        else:
            yield _Mark(path, place, _digest(f"{array.dtype}{array.shape}".encode() + array.tobytes()))
        return
    inside = [] if isinstance(part, (set, frozenset)) else list(parts(part))
    by_sample = place is None and isinstance(part, list) and len(part) == num_samples
    for number, (step, child) in enumerate(inside):
        yield from _marks(child, path + step, number if by_sample else place, num_samples)
    if not inside:
        yield _Mark(path, place, _digest(_to_bytes(part)))


def _as_array(part: Any) -> NDArray[Any] | None:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(part, torch.Tensor):
        return np.asarray(part) if isinstance(part, (np.ndarray, np.generic)) else None
    tensor = part.detach().cpu().to_dense() if part.layout is not torch.strided else part.detach().cpu()
    try:
        return np.asarray(tensor.numpy())
    except TypeError:  # a type that NumPy doesn't have, such as bfloat16
        return np.asarray(tensor.contiguous().reshape(*tensor.shape, 1).view(torch.uint8).numpy())


def _to_bytes(leaf: Any) -> bytes:
    if isinstance(leaf, (set, frozenset)):
        return repr(sorted(map(repr, leaf))).encode()  # their order is not part of them
    try:
        return pickle.dumps(leaf)
    except Exception:  # what came through a decoder of the user's own needn't be picklable
        return repr(leaf).encode()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _compare(reference: list[_Seen], resumed: list[_Seen], cut: int) -> None:
    how = f"after being stopped at batch {cut}" if cut else "when it is simply run again, without being stopped"
    for number, (expected, found) in enumerate(zip(reference, resumed, strict=True), cut):
        assert found.indices == expected.indices, (
            f"{how}, batch {number} consists of the samples {found.indices} instead of {expected.indices}; this is the "
            f"loader's own fault, unless make_loader gives different options from call to call"
        )
        if found.marks == expected.marks:
            continue
        names = [mark.path for mark in expected.marks]
        assert [mark.path for mark in found.marks] == names, (
            f"{how}, batch {number} (dataset indices {expected.indices}) has another structure. {_ADVICE}"
        )
        mark = next(mark for mark, other in zip(expected.marks, found.marks, strict=True) if mark != other)
        which = f"indices {expected.indices}" if mark.place is None else f"index {expected.indices[mark.place]}"
        raise AssertionError(f"{how}, the run differs at batch {number}, dataset {which}, {mark.path}. {_ADVICE}")
