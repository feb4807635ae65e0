"""Fetches single samples: how long they take and at which line, what they are like, and what they draw from."""

from __future__ import annotations

import faulthandler
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from swift_loader.batch.digests import digest_of, leaves_of
from swift_loader.batch.tree import type_name
from swift_loader.doctor.contents import generators_of
from swift_loader.doctor.examination import Diagnosis, Line, LineShare, Timing, is_users_file, line_of, quoted
from swift_loader.errors import counted
from swift_loader.metrics.machine import main_thread_ns
from swift_loader.runtime import LoaderThread
from swift_loader.sampling.permutation import permute
from swift_loader.transport.by_value import Definitions
from swift_loader.worker.fetch import OnError, PlannedSamples
from swift_loader.worker.seeding import Fetching, Rng, Seeding

SEED = 0x0D0C
"""Seed of all that is fetched."""

_MAX_TEXT = 300
_NUM_SLOWEST = 8
_MAX_SAMPLES = 20_000
"""Of very fast samples, more say nothing new."""

_PLACE_SIZE = 64

KEEP_NOTHING = (
    "Let a sample depend on its index and on swift_loader.sample_rng() alone: keep nothing from one sample to the "
    "next, no generator either, and leave out the time. What the constructor draws needs a fixed seed."
)


class Place:
    """Says in a file what the process is doing, and ends it if that takes too long."""

    def __init__(self, path: Path, stall_s: float) -> None:
        self._file = path.open("r+b", buffering=0)
        self._stall_s = stall_s
        self._armed_s = -float("inf")

    def at(self, doing: str, index: int = -1) -> None:
        """Say what comes next, and with which sample. If it takes too long, the stacks of all threads are written."""
        self._file.seek(0)
        self._file.write(f"{index} {doing}".ljust(_PLACE_SIZE).encode())
        if time.monotonic() > self._armed_s + self._stall_s / 10:  # arming takes too long for each sample
            faulthandler.dump_traceback_later(1.1 * self._stall_s, exit=True)
            self._armed_s = time.monotonic()


@dataclass(frozen=True, slots=True)
class Fetch:
    """The fetch of one sample."""

    index: int
    took_s: float
    cpu_s: float
    """CPU time of the thread that fetched it."""
    nbytes: int
    error: BaseException | None
    """What the sample raised, without its frames."""
    line: Line | None
    """The innermost line of the user's code in the error."""


class Subject:
    """The dataset under examination. Fetches its samples one by one, seeded as the loader seeds them."""

    def __init__(self, dataset: Any, num_samples: int, place: Place) -> None:
        self.dataset = dataset
        self.num_samples = num_samples
        self.num_fetches = 0
        self._place = place
        self._seeding = Seeding(Rng.SAMPLE, by_sample=True)
        self.singles = singles_of(dataset)
        """Call its `__getitem__` in `seeded`."""

    @contextmanager
    def seeded(self, index: int, epoch: int = 0) -> Iterator[Fetching]:
        """Seed for a sample while it is fetched."""
        fetching = Fetching(SEED, epoch, [index], [])
        self.num_fetches += 1
        self._place.at("fetching a sample", index)
        self._seeding.begin(fetching)
        self._seeding.begin_sample(0)
        try:
            yield fetching
        finally:
            self._seeding.needs_rebuild()
            self._place.at("looking at the samples")

    def fetch(self, index: int, sampler: StackSampler | None = None) -> Fetch:
        """Fetch a sample and measure it. The sampler is told when the dataset's code runs."""
        raised: BaseException | None = None
        sample = None
        with self.seeded(index):
            if sampler is not None:
                sampler.index = index
            cpu_s, began_s = time.thread_time(), time.perf_counter()
            try:
                sample = self.singles[index]
            except (Exception, SystemExit) as error:
                raised = error
            took_s, cpu_s = time.perf_counter() - began_s, time.thread_time() - cpu_s
            if sampler is not None:
                sampler.index = None  # before anything else: what comes now isn't the sample's time
        if raised is None:
            return Fetch(index, took_s, cpu_s, nbytes_of(sample), None, None)
        frames = traceback.extract_tb(raised.__traceback__)[::-1]
        stack = [Line(one.filename, one.lineno or 0, one.name) for one in frames if is_users_file(one.filename)]
        return Fetch(index, took_s, cpu_s, 0, raised.with_traceback(None), line_of(stack))

    def first_failing(self) -> int:
        """Return the index from which on samples fail, if the last one does."""
        good, bad = -1, self.num_samples - 1
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (good, middle) if self.fetch(middle).error is not None else (middle, bad)
        return bad


def singles_of(dataset: Any) -> Any:
    """Return what has a `__getitem__` for an index: the dataset, unless it has only `__getitems__`."""
    return PlannedSamples(dataset, 0, OnError.RAISE, Seeding(Rng.SAMPLE), Definitions()).singles


def probe_order(num_samples: int) -> list[int]:
    """Return dataset indices to look at: the first, the last, then others from all over the dataset."""
    positions = np.arange(min(num_samples, _MAX_SAMPLES), dtype=np.uint64)
    others = permute(positions, num_samples, np.array([SEED], np.uint64)).tolist()
    return list(dict.fromkeys((0, num_samples - 1, *others)))


def timing_of(samples: Sequence[Fetch]) -> Timing:
    """Return the statistics of samples. The first one, which warms up, counts only if it is alone."""
    counted = samples[1:] or samples
    took = np.array([sample.took_s for sample in counted])
    slowest = sorted(counted, key=lambda sample: -sample.took_s)[:_NUM_SLOWEST]
    mean_s, cpu_s = float(took.mean()), sum(sample.cpu_s for sample in counted)
    cpu_share = min(1.0, cpu_s / max(float(took.sum()), 1e-12))
    ran_ns, waited_ns = main_thread_ns()  # since the process began: it has done little else
    return Timing(
        num_samples=len(samples),
        p50_s=float(np.percentile(took, 50)),
        p99_s=float(np.percentile(took, 99)),
        max_s=float(took.max()),
        mean_s=mean_s,
        cpu_share=cpu_share,
        core_wait_share=min(1 - cpu_share, cpu_share * waited_ns / max(1, ran_ns)),
        slowest=tuple((sample.index, sample.took_s) for sample in slowest),
        nbytes=float(np.mean([sample.nbytes for sample in samples])),
        samples_per_s=1 / max(mean_s, 1e-9),
    )


def text_of(error: BaseException | None) -> str:
    """Return an error's type and message."""
    return "".join(traceback.format_exception_only(error)).strip()[:_MAX_TEXT]


# Lines ----------------------------------------------------------------------------------------------------------------

_NUM_LINES = 8
_LEAST_SHARE = 0.005
_MAX_FRAMES = 200

_EVERY_S = 0.004
"""Looking so often costs a fetching thread that computes about 1 % of its time."""


class StackSampler:
    """A thread that looks at the stack of the thread that made it, while that thread fetches samples.

    C code that holds the GIL delays a look to its end; the look then finds the line that called it, or the next one.
    """

    def __init__(self) -> None:
        self.index: int | None = None
        """The sample that is being fetched; None: none is. The fetching thread sets it."""
        self.num_hits = 0
        """How often the fetching thread was found within a sample."""
        self._thread_id = threading.get_ident()
        self._stop = threading.Event()
        self._hits: Counter[tuple[int, Line]] = Counter()
        is_users_file("")  # the first call is slow
        self._thread = LoaderThread(self._run, "doctor")
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def shares(self, indices: Collection[int] | None = None) -> tuple[LineShare, ...]:
        """Return the lines that took the time of some samples, or of all. Call it after `stop`."""
        hits: Counter[Line] = Counter()
        for (index, line), count in self._hits.items():
            if indices is None or index in indices:
                hits[line] += count
        ordered = sorted(hits.items(), key=lambda item: (-item[1], str(item[0])))
        shares = (LineShare(line, count / hits.total(), count) for line, count in ordered[:_NUM_LINES])
        return tuple(one for one in shares if one.share >= _LEAST_SHARE)

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            frame = sys._current_frames().get(self._thread_id)  # noqa: SLF001 - documented, despite its name
            index = self.index
            line = None if index is None else line_of(_stack_from(frame))
            if index is not None and line is not None:
                self._hits[index, line] += 1
                self.num_hits += 1


def _stack_from(frame: FrameType | None) -> list[Line]:
    """Return the frames from the innermost one to the dataset's method; none if it isn't within a sample."""
    stack: list[Line] = []
    while frame is not None and len(stack) < _MAX_FRAMES:
        if frame.f_code.co_filename == __file__:
            return stack
        stack.append(Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return []


# Size -----------------------------------------------------------------------------------------------------------------


def nbytes_of(sample: Any) -> int:
    """Return the size of a sample's or batch's leaves."""
    return sum(_nbytes(leaf) for _, leaf in leaves_of(sample))


def _nbytes(leaf: Any) -> int:
    if hasattr(leaf, "getbands") and hasattr(leaf, "width"):  # an image of Pillow's
        return int(leaf.width * leaf.height * len(leaf.getbands()))
    if isinstance(leaf, (str, bytes)):
        return len(leaf)
    return int(getattr(leaf, "nbytes", None) or sys.getsizeof(leaf))


# Randomness -----------------------------------------------------------------------------------------------------------

_CLOCKS = [time.time, time.time_ns, datetime.now]

Held = dict[str, Any]
"""The generators that the dataset holds, by a name for people."""


class _Watched(NamedTuple):
    """What was seen of the fetch of a sample."""

    drawn: list[str]
    """What it drew from."""
    states: dict[str, bytes]
    """Of all generators after it."""
    digests: dict[str, bytes]
    """Of its leaves, by path."""


def judge_randomness(subject: Subject, indices: Sequence[int], seconds: float, diagnosis: Diagnosis) -> None:
    """Find what isn't keyed in some samples, as many as there is time for. Those that fail are left out."""
    held = generators_of(subject.dataset)
    repeated: dict[int, _Watched] = {}
    differing: dict[int, str] = {}
    """The first path that isn't the same again."""
    reseeded: set[str] | None = None
    """Generators that the loader seeds, but that are in the same state after each sample in another epoch."""
    failed, deadline_s = "", time.perf_counter() + seconds
    for index in indices:
        try:
            first, again, later = (_watched(subject, index, epoch, held) for epoch in (0, 0, 1))
        except (Exception, SystemExit) as error:
            failed = type_name(error)
        else:
            repeated[index] = first
            if first.digests != again.digests:
                paths = (path for path, digest in first.digests.items() if digest != again.digests.get(path))
                differing[index] = next(paths, "")
            stuck = {name for name, state in first.states.items() if name not in held and state == later.states[name]}
            reseeded = stuck if reseeded is None else reseeded & stuck
        if time.perf_counter() > deadline_s:
            break
    if not repeated:
        diagnosis.warning(
            "randomness",
            "Nothing shows whether samples can be repeated.",
            f"all of {len(indices)} that were fetched again failed; the last one with {failed}",
            "Mend what fails, and examine it again.",
        )
        return
    sources = dict.fromkeys(name for one in repeated.values() for name in one.drawn)
    keyed, num_samples = [name for name in sources if name not in held], counted(len(repeated), "sample")
    if differing:
        drawn = dict.fromkeys(name for index in differing for name in repeated[index].drawn)
        _tell_difference(subject, differing, [name for name in drawn if name in held], diagnosis)
    else:
        diagnosis.healthy.append(f"{num_samples} built twice with the same seeds are equal")
    if keyed:
        diagnosis.healthy.append(f"samples draw from {quoted(keyed)}, keyed by sample")
    elif not sources and not differing:
        diagnosis.healthy.append(f"{num_samples} draw no random numbers")
    if reseeded:  # the seeds differ, so the states should
        names = quoted(sorted(reseeded))
        diagnosis.warning(
            "randomness",
            f"__getitem__ seeds {names} itself, so a sample draws the same in each epoch.",
            f"after a sample, the state of {names} is the same in epochs 0 and 1",
            "Leave the seeding to the loader, which seeds by sample and epoch, or use swift_loader.sample_rng().",
        )


def _tell_difference(subject: Subject, differing: dict[int, str], guilty: list[str], diagnosis: Diagnosis) -> None:
    """Add the finding that samples with these indices differ, at these paths. `guilty`: what they draw from."""
    clocks: set[str] = set()

    def note(frame: FrameType, _event: str, called: Any) -> None:
        if called in _CLOCKS:
            clocks.add(f"{called.__name__}() at {line_of(_stack_from(frame))}")

    indices, paths = sorted(differing), sorted({f"sample{path}" for path in differing.values()})
    with subject.seeded(indices[0]), suppress(Exception):
        sys.setprofile(note)
        subject.singles[indices[0]]
    sys.setprofile(None)
    causes = [*(f"draw from {one}" for one in guilty), *(f"call {one}" for one in sorted(clocks))]
    cause = f"they {quoted(causes)}" if causes else "no random source was seen: they may depend on earlier samples (a "
    cause += "" if causes else "counter, a cache), on the time, or on a generator made without a seed"
    what, remedy = "", KEEP_NOTHING
    if guilty:
        what = "Workers have copies of the dataset's generator: they may draw the same, and again in each epoch. "
        remedy = "In __getitem__, draw from swift_loader.sample_rng(), or from random, numpy.random or torch's default "
        remedy += "generator: the loader seeds these for each sample, differently in each epoch."
    what += "Samples differ when they are fetched twice with the same seeds, so a run can't be repeated or resumed."
    seen = f"dataset indices {quoted(indices)}, in {quoted(paths)}; {cause}"
    diagnosis.fault("randomness", what, seen, remedy, indices)


def _watched(subject: Subject, index: int, epoch: int, held: Held) -> _Watched:
    """Fetch a sample, and watch what it draws from."""
    with subject.seeded(index, epoch) as fetching:
        before = _states(held)
        sample = subject.singles[index]
        after = _states(held)
        drawn = [name for name, state in after.items() if before.get(name, state) != state]
        if fetching._generator is not None:  # noqa: SLF001 - of this package
            drawn.append("sample_rng()")
    return _Watched(drawn, after, {path: digest_of(leaf) for path, leaf in leaves_of(sample)})


def _states(held: Held) -> dict[str, bytes]:
    """Return the digests of the states of the global generators and of those that the dataset holds."""
    states: dict[str, Any] = {"random": random.getstate(), "numpy.random": np.random.get_state()}  # noqa: NPY002
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch's default generator"] = torch.default_generator.get_state()
    for name, generator in held.items():
        read = getattr(generator, "getstate", getattr(generator, "get_state", None))
        source: Any = getattr(generator, "bit_generator", generator)
        states[name] = source.state if read is None else read()
    return {name: digest_of(state) for name, state in states.items()}
