"""Fetches single samples: what they are like, whether they come out the same again, and what they draw from."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from swift_loader.batch.digests import digest_of, leaves_of
from swift_loader.batch.tree import type_name
from swift_loader.doctor.contents import generators_of
from swift_loader.doctor.diagnosis import Diagnosis, count_text, quoted
from swift_loader.transport.by_value import Definitions
from swift_loader.worker.fetch import Fetcher, OnError
from swift_loader.worker.seeding import Fetching, Rng, Seeding

SEED = 0x0D0C
"""Seed of all that is fetched."""

_TEXT = {"U": "text", "S": "bytes"}
"""Kinds of NumPy's dtypes that depend on the length of the text."""

USE_KEYED = (
    "Draw from swift_loader.sample_rng() in __getitem__, or from random, numpy.random or torch's default generator, "
    "which the loader seeds for each sample."
)
KEEP_NOTHING = (
    "Let a sample depend on its index and on swift_loader.sample_rng() alone: keep nothing from one sample to the "
    "next, leave out the time, and give a generator in the constructor a fixed seed."
)


class Subject:
    """The dataset under examination. Fetches its samples one by one, seeded as the loader seeds them."""

    def __init__(self, dataset: Any, num_samples: int, at: Callable[[str, int | None], None]) -> None:
        """Fetch from a dataset. `at` is told what is done, and with which sample."""
        self.dataset = dataset
        self.num_samples = num_samples
        self.num_fetches = 0
        self.batch_seeding = Seeding(Rng.SAMPLE)
        self.fetcher = Fetcher(dataset, num_samples, OnError.RAISE, self.batch_seeding, Definitions())
        """Fetches batches, as a worker does."""
        self.singles = self.fetcher._singles  # noqa: SLF001 - of this package
        """Has a `__getitem__` for an index. Call it in `seeded`."""
        self._at = at
        self._seeding = Seeding(Rng.SAMPLE, by_sample=True)

    @contextmanager
    def seeded(self, index: int, epoch: int = 0) -> Iterator[Fetching]:
        """Seed for a sample while it is fetched."""
        fetching = Fetching(SEED, epoch, [index], [])
        self.num_fetches += 1
        self._at("fetching a sample", index)
        self._seeding.begin(fetching)
        self._seeding.begin_sample(0)
        try:
            yield fetching
        finally:
            self._seeding.needs_rebuild()
            self._at("looking at the samples", None)


# Leaves ---------------------------------------------------------------------------------------------------------------


class Leaf(NamedTuple):
    """A leaf of a sample."""

    path: str
    """Such as `['image']` or `[0]`; empty if the sample is a leaf itself."""
    dtype: str
    """Of other objects than arrays and tensors, the type."""
    shape: tuple[int, ...] | None
    nbytes: int

    @property
    def form(self) -> str:
        """What must be the same in all samples of a batch."""
        return self.dtype if self.shape is None else f"{self.dtype} {self.shape}"


def layout_of(sample: Any) -> tuple[Leaf, ...]:
    """Return what a sample consists of."""
    return tuple(_described(path, leaf) for path, leaf in leaves_of(sample))


def _described(path: str, leaf: Any) -> Leaf:
    if isinstance(leaf, (np.ndarray, np.generic)) or _is_tensor(leaf):
        dtype = _TEXT.get(getattr(leaf.dtype, "kind", ""), str(leaf.dtype))
        return Leaf(path, dtype, tuple(map(int, leaf.shape)), int(leaf.nbytes))
    if hasattr(leaf, "getbands") and hasattr(leaf, "width"):  # an image of Pillow's
        nbytes = leaf.width * leaf.height * len(leaf.getbands())
    else:
        nbytes = len(leaf) if isinstance(leaf, (str, bytes)) else sys.getsizeof(leaf)
    return Leaf(path, type_name(leaf), None, nbytes)


def _is_tensor(leaf: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(leaf, torch.Tensor)


def judge_leaves(samples: Sequence[tuple[int, tuple[Leaf, ...]]], error: str, diagnosis: Diagnosis) -> None:
    """Find leaves that can't be collated, and dtypes that surprise, in (index, layout) of samples.

    `error` is what the collate function raised.
    """
    by_forms: dict[frozenset[str], list[int]] = defaultdict(list)
    for index, layout in samples:
        by_forms[frozenset(f"sample{leaf.path}: {leaf.form}" for leaf in layout)].append(index)
    usual, *odd = sorted(by_forms.items(), key=lambda item: -len(item[1]))
    differing = sorted({form for forms, _ in odd for form in forms ^ usual[0]})
    breaks = any("(" in form for form in differing)  # text of any length is no trouble
    if error or breaks:
        leaf = f", because of {differing[0].split(':')[0]}" if differing else ""
        seen = f"{'the others differ in' if odd else 'these are'} {quoted(differing or sorted(usual[0]))}"
        seen += f"; the collate function raised {error}" if error else ""
        (diagnosis.fault if error else diagnosis.warning)(
            "leaves",
            f"Samples can't be collated into a batch{leaf}.",
            f"{len(usual[1])} of {len(samples)} samples have the same leaves; {seen}",
            "Pad or crop to one shape in __getitem__, and return arrays, tensors, numbers or containers of them; or "
            "pass a collate_fn, such as one that pads to the longest sample of the batch.",
            sorted(min(indices) for _, indices in odd),
        )
    else:
        diagnosis.healthy.append("all samples have the same leaves, with the same dtypes and shapes")
    arrays = {leaf.path: leaf for _, layout in samples for leaf in layout if leaf.shape}
    objects = [f"sample{path}" for path, leaf in arrays.items() if leaf.dtype == "object"]
    doubles = [f"sample{path} {leaf.shape}" for path, leaf in arrays.items() if leaf.dtype.endswith("float64")]
    if objects:
        diagnosis.warning(
            "leaves",
            "A leaf is an array of Python objects, which is slow to send and no tensor can be made of.",
            quoted(objects),
            "Return an array of numbers, or a list.",
        )
    if doubles:
        diagnosis.note(
            "leaves",
            "A leaf is float64, twice the bytes of float32, which models usually want.",
            quoted(doubles),
            "Convert it with .astype(numpy.float32), unless the precision is needed.",
        )


# Randomness -----------------------------------------------------------------------------------------------------------


def judge_randomness(subject: Subject, indices: Sequence[int], seconds: float, diagnosis: Diagnosis) -> None:
    """Fetch samples twice with the same seeds, and once with those of another epoch. Find what isn't keyed.

    Samples that fail are left out.
    """
    held = generators_of(subject.dataset)
    differing: dict[int, str] = {}
    sources: dict[str, list[int]] = defaultdict(list)
    reseeded: set[str] | None = None
    deadline_s, num_samples = time.perf_counter() + seconds, 0
    for index in indices:
        with suppress(Exception, SystemExit):
            drawn, states, digests = _watched(subject, index, 0, held)
            _, _, again = _watched(subject, index, 0, held)
            _, later, _ = _watched(subject, index, 1, held)
            num_samples += 1
            if digests != again:
                differing[index] = next((path for path in digests if digests[path] != again.get(path)), "")
            for name in drawn:
                sources[name].append(index)
            same = {name for name in states if name not in held and states[name] == later.get(name)}
            reseeded = same if reseeded is None else reseeded & same  # the seeds differ, so the states should
        if time.perf_counter() > deadline_s:
            break
    if not num_samples:
        return
    if differing:
        guilty = [name for name in sources if name in held and differing.keys() & set(sources[name])]
        cause = (
            f"they draw from {quoted(guilty)}, which the loader doesn't seed"
            if guilty
            else "no random source was seen: they may depend on earlier samples (a counter, a cache), on the time, or "
            "on a generator made without a seed, such as random.Random() in __getitem__"
        )
        paths = sorted({f"sample{path}" for path in differing.values()})
        diagnosis.fault(
            "randomness",
            "Samples differ when they are fetched twice with the same seeds, so a run can't be repeated or resumed "
            "exactly.",
            f"dataset indices {quoted(sorted(differing))}, in {quoted(paths)}; {cause}",
            USE_KEYED if guilty else KEEP_NOTHING,
            sorted(differing),
        )
    else:
        diagnosis.healthy.append(f"{count_text(num_samples, 'sample')} built twice with the same seeds are equal")
    keyed = [name for name in sources if name not in held]
    if keyed:
        diagnosis.healthy.append(f"samples draw from {quoted(keyed)}, keyed by sample")
    elif not sources and not differing:
        diagnosis.healthy.append(f"{count_text(num_samples, 'sample')} draw no random numbers")
    if reseeded:
        names = quoted(sorted(reseeded))
        diagnosis.warning(
            "randomness",
            f"__getitem__ seeds {names} itself, so a sample draws the same in each epoch.",
            f"after a sample, the state of {names} is the same in epochs 0 and 1",
            "Leave the seeding to the loader, which seeds by sample and epoch, or use swift_loader.sample_rng().",
        )


def _watched(
    subject: Subject, index: int, epoch: int, held: Mapping[str, Any]
) -> tuple[list[str], dict[str, bytes], dict[str, bytes]]:
    """Fetch a sample. Return what it drew from, the states of all generators after it, and its digests by path."""
    with subject.seeded(index, epoch) as fetching:
        before = _states(held)
        sample = subject.singles[index]
        after = _states(held)
        used_rng = fetching._generator is not None  # noqa: SLF001 - of this package
    drawn = [name for name, state in after.items() if before.get(name, state) != state]
    return (
        [*drawn, *(["sample_rng()"] if used_rng else [])],
        after,
        {p: digest_of(leaf) for p, leaf in leaves_of(sample)},
    )


def _states(held: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the digests of the states of the global generators and of those that the dataset holds."""
    states: dict[str, Any] = {"random": random.getstate(), "numpy.random": np.random.get_state()}  # noqa: NPY002
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch's default generator"] = torch.default_generator.get_state()
    for name, generator in held.items():
        if isinstance(generator, random.Random):
            states[name] = generator.getstate()
        elif hasattr(generator, "get_state"):
            states[name] = generator.get_state()
        else:
            states[name] = getattr(generator, "bit_generator", generator).state
    return {
        name: hashlib.blake2b(pickle.dumps(state.numpy().tobytes() if hasattr(state, "numpy") else state)).digest()
        for name, state in states.items()
    }
