"""Fetches single samples: what they are like, whether they come out the same again, and what they draw from."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from swift_loader.batch.digests import digest_of, leaves_of
from swift_loader.batch.tree import type_name
from swift_loader.doctor.contents import generators_of
from swift_loader.doctor.diagnosis import Diagnosis, Line, Timing, count_text, quoted
from swift_loader.doctor.stacks import StackSampler, is_users_file, line_of
from swift_loader.sampling.permutation import permute
from swift_loader.transport.by_value import Definitions
from swift_loader.worker.fetch import Fetcher, OnError
from swift_loader.worker.seeding import Fetching, Rng, Seeding

SEED = 0x0D0C
"""Seed of all that is fetched."""

_MAX_TEXT = 300
_NUM_SLOWEST = 8
_MAX_SAMPLES = 20_000
"""Of very fast samples, more say nothing new."""

_TEXT = {"U": "text", "S": "bytes"}
"""Kinds of NumPy's dtypes that depend on the length of the text."""

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


@dataclass(frozen=True, slots=True)
class Fetch:
    """The fetch of one sample."""

    index: int
    took_s: float
    cpu_s: float
    """CPU time of the thread that fetched it."""
    layout: tuple[Leaf, ...]
    error: BaseException | None
    """What the sample raised, without its frames."""
    line: Line | None
    """The innermost line of the user's code in the error."""


def probe_order(num_samples: int) -> list[int]:
    """Return dataset indices to look at: the first, the last, then others from all over the dataset."""
    positions = np.arange(min(num_samples, _MAX_SAMPLES), dtype=np.uint64)
    others = permute(positions, num_samples, np.array([SEED], np.uint64)).tolist()
    return list(dict.fromkeys((0, num_samples - 1, *others)))


def fetch_one(subject: Subject, index: int, sampler: StackSampler | None = None) -> Fetch:
    """Fetch a sample and measure it. The sampler is told when the dataset's code runs."""
    raised: BaseException | None = None
    sample = None
    with subject.seeded(index):
        if sampler is not None:
            sampler.index = index
        cpu_s, began_s = time.thread_time(), time.perf_counter()
        try:
            sample = subject.singles[index]
        except (Exception, SystemExit) as error:
            raised = error
        took_s, cpu_s = time.perf_counter() - began_s, time.thread_time() - cpu_s
        if sampler is not None:
            sampler.index = None  # before anything else: what comes now isn't the sample's time
    if raised is None:
        return Fetch(index, took_s, cpu_s, layout_of(sample), None, None)
    frames = reversed(traceback.extract_tb(raised.__traceback__))
    stack = [Line(frame.filename, frame.lineno or 0, frame.name) for frame in frames if is_users_file(frame.filename)]
    return Fetch(index, took_s, cpu_s, (), raised.with_traceback(None), line_of(stack))


def first_failing(subject: Subject) -> int:
    """Return the index from which on samples fail, if the last one does."""
    good, bad = -1, subject.num_samples - 1
    while bad - good > 1:
        middle = (good + bad) // 2
        if fetch_one(subject, middle).error is not None:
            bad = middle
        else:
            good = middle
    return bad


def timing_of(samples: Sequence[Fetch]) -> Timing:
    """Return the statistics of samples. The first one, which warms up, counts only if it is alone."""
    counted = samples[1:] or samples
    took = np.array([sample.took_s for sample in counted])
    cpu_s = sum(sample.cpu_s for sample in counted)
    p50_s, p99_s = np.percentile(took, [50, 99])
    order = np.argsort(-took, kind="stable")[:_NUM_SLOWEST].tolist()
    mean_s = float(took.mean())
    return Timing(
        num_samples=len(samples),
        p50_s=float(p50_s),
        p99_s=float(p99_s),
        max_s=float(took.max()),
        mean_s=mean_s,
        cpu_share=min(1.0, cpu_s / max(float(took.sum()), 1e-12)),
        slowest=tuple((counted[number].index, counted[number].took_s) for number in order),
        nbytes=float(np.mean([sum(leaf.nbytes for leaf in sample.layout) for sample in samples])),
        samples_per_s=1 / max(mean_s, 1e-9),
    )


def text_of(error: BaseException | None) -> str:
    """Return an error's type and message."""
    return "".join(traceback.format_exception_only(error)).strip()[:_MAX_TEXT]


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
    failed = ""
    deadline_s, num_samples = time.perf_counter() + seconds, 0
    for index in indices:
        try:
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
        except (Exception, SystemExit) as error:
            failed = type_name(error)
        if time.perf_counter() > deadline_s:
            break
    if failed and not num_samples:
        diagnosis.warning(
            "randomness",
            "Nothing shows whether samples can be repeated.",
            f"all of {len(indices)} that were fetched again failed; the last one with {failed}",
            "Mend what fails, and examine it again.",
        )
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
            "Draw from swift_loader.sample_rng() in __getitem__, or from random, numpy.random or torch's default "
            "generator, which the loader seeds for each sample."
            if guilty
            else KEEP_NOTHING,
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
