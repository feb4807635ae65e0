"""Fetches single samples: how long they take and at which line, and whether they can be repeated. Also what the dataset
holds: containers of Python objects, random generators.
"""

from __future__ import annotations

import faulthandler
import functools
import io
import logging
import random
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np

from swift_loader.batch.digests import digest_of, leaves_of
from swift_loader.batch.tree import type_name
from swift_loader.doctor.examination import Diagnosis, Line, LineShare, Timing, is_users_file, line_of, quoted
from swift_loader.errors import counted, nbytes_text
from swift_loader.runtime import LoaderThread
from swift_loader.sampling.permutation import permute
from swift_loader.transport.by_value import Definitions
from swift_loader.worker.fetch import OnError, PlannedSamples
from swift_loader.worker.seeding import Fetching, Rng, Seeding

SEED = 0x0D0C
"""Seed of all that is fetched."""

T = TypeVar("T")

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
    error: BaseException | None
    """What the sample raised, without its frames."""
    line: Line | None
    """The innermost line of the user's code in the error."""


class Subject:
    """The dataset under examination. Fetches its samples one by one, seeded as the loader seeds them."""

    def __init__(self, dataset: Any, num_samples: int, place: Place) -> None:
        self.dataset = dataset
        self.num_samples = num_samples
        self._place = place
        self._seeding = Seeding(Rng.SAMPLE, by_sample=True)
        self.singles = singles_of(dataset)
        """Call its `__getitem__` in `seeded`."""

    @contextmanager
    def seeded(self, index: int, epoch: int = 0) -> Iterator[None]:
        """Seed for a sample while it is fetched."""
        self._place.at("fetching a sample", index)
        self._seeding.begin(Fetching(SEED, epoch, [index], []))
        self._seeding.begin_sample(0)
        try:
            yield
        finally:
            self._seeding.needs_rebuild()
            self._place.at("looking at the samples")

    def fetch(self, index: int, sampler: StackSampler | None = None) -> Fetch:
        """Fetch a sample and measure it. The sampler is told when the dataset's code runs."""
        raised: BaseException | None = None
        with self.seeded(index):
            if sampler is not None:
                sampler.index = index
            cpu_s, began_s = time.thread_time(), time.perf_counter()
            try:
                self.singles[index]
            except (Exception, SystemExit) as error:
                raised = error
            took_s, cpu_s = time.perf_counter() - began_s, time.thread_time() - cpu_s
            if sampler is not None:
                sampler.index = None  # before anything else: what comes now isn't the sample's time
        if raised is None:
            return Fetch(index, took_s, cpu_s, None, None)
        frames = traceback.extract_tb(raised.__traceback__)[::-1]
        stack = [Line(one.filename, one.lineno or 0, one.name) for one in frames if is_users_file(one.filename)]
        return Fetch(index, took_s, cpu_s, raised.with_traceback(None), line_of(stack))

    def digests(self, index: int, epoch: int = 0) -> dict[str, bytes]:
        """Fetch a sample and return the digests of its leaves, by path; none if it fails this time."""
        try:
            with self.seeded(index, epoch):
                sample = self.singles[index]
        except (Exception, SystemExit):
            return {}
        return {path: digest_of(leaf) for path, leaf in leaves_of(sample)}

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
    mean_s, cpu_s = max(float(took.mean()), 1e-9), sum(sample.cpu_s for sample in counted)
    cpu_share = min(1.0, cpu_s / max(float(took.sum()), 1e-12))
    return Timing(
        num_samples=len(samples),
        p50_s=float(np.percentile(took, 50)),
        p99_s=float(np.percentile(took, 99)),
        max_s=float(took.max()),
        mean_s=mean_s,
        cpu_share=cpu_share,
        slowest=tuple((sample.index, sample.took_s) for sample in slowest),
    )


def within(seconds: float, items: Iterable[T]) -> Iterator[T]:
    """Yield items for so long, at least one."""
    deadline_s = time.perf_counter() + seconds
    for item in items:
        yield item
        if time.perf_counter() > deadline_s:
            return


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
        shares = (LineShare(line, count / hits.total()) for line, count in ordered[:_NUM_LINES])
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


# Randomness -----------------------------------------------------------------------------------------------------------


def judge_randomness(subject: Subject, indices: Sequence[int], seconds: float, diagnosis: Diagnosis) -> None:
    """Build some samples twice with the same seeds, as many as there is time for, and find those that differ."""
    held = generators_of(subject.dataset)
    states = {name: _state_of(generator) for name, generator in held.items()}
    differing: dict[int, str] = {}
    """By index: the first path that isn't the same again."""
    num_samples, reseeded = 0, {"random", "numpy.random", "torch"}
    for index in within(seconds, indices):
        first, again, after = subject.digests(index), subject.digests(index), _states_of_global()
        subject.digests(index, epoch=1)
        reseeded &= {name for name, state in _states_of_global().items() if state == after[name]}
        num_samples += 1
        if first != again:
            differing[index] = next((path for path, digest in first.items() if digest != again.get(path)), "")
    if reseeded and num_samples:  # the seeds differ, so the states should
        diagnosis.warning(
            "randomness",
            f"__getitem__ seeds {quoted(sorted(reseeded))} itself, so a sample draws the same in each epoch.",
            "the generator's state after a sample is the same in epochs 0 and 1",
            "Leave the seeding to the loader, which seeds by sample and epoch, or use swift_loader.sample_rng().",
        )
    if not differing:
        diagnosis.healthy.append(f"{counted(num_samples, 'sample')} built twice with the same seeds are equal")
        return
    what, remedy = "", KEEP_NOTHING
    cause = "no random source was seen: they may depend on earlier samples (a counter, a cache), on the time, or on a "
    cause += "generator made without a seed"
    drawn_from = [name for name, generator in held.items() if _state_of(generator) != states[name]]
    if drawn_from:
        cause = f"the dataset draws from {quoted(drawn_from)}"
        what = "Workers have copies of the dataset's generator: they may draw the same, and again in each epoch. "
        remedy = "In __getitem__, draw from swift_loader.sample_rng(), or from random, numpy.random or torch's default "
        remedy += "generator: the loader seeds these for each sample, differently in each epoch."
    what += "Samples differ when they are fetched twice with the same seeds, so a run can't be repeated or resumed."
    paths = sorted({f"sample{path}" for path in differing.values()})
    seen = f"dataset indices {quoted(sorted(differing))}, in {quoted(paths)}; {cause}"
    diagnosis.fault("randomness", what, seen, remedy, sorted(differing))


def _states_of_global() -> dict[str, bytes]:
    """Return the states of the generators that the loader seeds, by the modules that own them."""
    torch = sys.modules.get("torch")
    states = {"random": digest_of(random.getstate()), "numpy.random": digest_of(np.random.get_state())}  # noqa: NPY002 - the global one
    return states if torch is None else {**states, "torch": digest_of(torch.get_rng_state())}


def _state_of(generator: Any) -> bytes:
    read = getattr(generator, "getstate", getattr(generator, "get_state", None))
    return digest_of(getattr(generator, "bit_generator", generator).state if read is None else read())


# What grows in workers ------------------------------------------------------------------------------------------------
#
# Forked workers share the pages of the dataset until they write to them. Reading a Python object writes: it counts the
# reference in the object's header. So each worker ends with its own copy of all Python objects that it has read. The
# data of arrays isn't affected.

Held = list[tuple[str, Any]]
"""All that `walk` yields of the dataset."""

_LARGE_NBYTES = 16 << 20
"""Containers from this size on are reported. A worker takes about 10 times as much anyway."""
_LEAST_OBJECTS = 1000
"""Containers with fewer Python objects aren't worth a look."""
_MAX_NESTING = 5

_GROWS_SHARE = 0.5
"""A container that gets so many items per sample grows with the samples."""


def judge_containers(held: Held, diagnosis: Diagnosis) -> None:
    """Find containers with many Python objects, the largest first."""
    found: list[tuple[float, float, str, str]] = []
    for path, thing in held:
        inside = tuple(f"{one[2]}{step}" for one in found for step in ".[{")
        if not path.startswith(inside):  # else it is counted with what holds it
            found += ((*_size_of(items), where, kind) for where, kind, items in _objects_of(path, thing))
    large = sorted((one for one in found if one[0] >= _LARGE_NBYTES), reverse=True)
    for nbytes, num_objects, path, kind in large:
        diagnosis.warning(
            "memory",
            f"dataset{path} will be copied into each worker, because reading a Python object changes its reference "
            f"count.",
            f"a {kind} of {num_objects - 1:,.0f} Python objects, about {nbytes_text(nbytes)} in each worker",
            "Keep it as a NumPy array, a pyarrow array, or one bytes object with an array of offsets: workers share "
            "these.",
        )
    if not large:
        total = nbytes_text(sum(one[0] for one in found))
        diagnosis.healthy.append(f"it holds {total} of Python objects, so workers stay small")


def _objects_of(path: str, thing: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield (path, kind, container) if it has many Python objects; for a table of pandas, for each such column."""
    if isinstance(thing, _CONTAINERS) and len(thing) >= _LEAST_OBJECTS:
        yield path, type_name(thing), thing
    elif isinstance(thing, np.ndarray) and thing.dtype.hasobject and thing.size >= _LEAST_OBJECTS:
        yield path, f"numpy.ndarray of dtype {thing.dtype}", thing.ravel().tolist()
    elif type(thing).__module__.startswith("pandas") and hasattr(thing, "dtypes"):
        is_table = type(thing).__name__ == "DataFrame"
        for name, column in thing.items() if is_table else [("", thing)]:
            if str(getattr(column, "dtype", "")) == "object" and len(column) >= _LEAST_OBJECTS:
                where = f"{path}[{name!r}]" if is_table else path
                yield where, "pandas column of dtype object", column.tolist()


def _size_of(thing: Any, depth: int = 0) -> tuple[float, float]:
    """Return the bytes and the number of the Python objects in a container and itself, estimated from some of them."""
    own = float(sys.getsizeof(thing)) if not isinstance(thing, np.ndarray) else 0.0
    if depth > _MAX_NESTING or not isinstance(thing, _CONTAINERS) or not thing:
        return own, 1
    num_items = len(thing)
    chosen = _evenly(thing, num_items)
    if isinstance(thing, dict):
        chosen += _evenly(thing.values(), num_items)
        num_items *= 2
    parts = [_size_of(item, depth + 1) for item in chosen]
    shared = len({id(item) for item in chosen}) / len(chosen)  # the same object again takes no more
    factor = num_items / len(chosen) * shared
    return own + factor * sum(part[0] for part in parts), 1 + factor * sum(part[1] for part in parts)


def lengths_of(held: Held) -> dict[str, int]:
    """Return the lengths of all containers that can grow, by path."""
    return {path: len(thing) for path, thing in held if isinstance(thing, (list, dict, set))}


def judge_growth(before: dict[str, int], held: Held, num_samples: int, diagnosis: Diagnosis) -> None:
    """Find containers that became longer while so many samples were fetched."""
    least = max(2, _GROWS_SHARE * num_samples)
    grown = [
        f"dataset{path} from {before[path]:,} to {length:,} items"
        for path, length in lengths_of(held).items()
        if length - before.get(path, length) >= least
    ]
    if grown:
        diagnosis.warning(
            "memory",
            "The dataset grows with each sample, in each worker separately.",
            f"{quoted(grown)}, over {num_samples:,} samples",
            "Bound the cache (functools.lru_cache with maxsize), or fill it once in the constructor, before workers "
            "fork.",
        )


def generators_of(dataset: object) -> dict[str, Any]:
    """Return the random generators that the dataset or its module holds, by a name for people."""
    torch = sys.modules.get("torch")
    kinds: tuple[type, ...] = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
    if torch is not None:
        kinds = (*kinds, torch.Generator)
    module = type(dataset).__module__
    of_module = [
        (f"{module}.{name}", value) for name, value in getattr(sys.modules.get(module), "__dict__", {}).items()
    ]
    return {
        f"{path} ({type_name(thing)})": thing
        for path, thing in (*walk(dataset, "dataset"), *of_module)
        if isinstance(thing, kinds) and not isinstance(thing, random.SystemRandom)
    }


# What an object holds -------------------------------------------------------------------------------------------------

_CONTAINERS = (list, tuple, dict, set, frozenset, deque)

_MAX_OBJECTS = 20_000
_MAX_DEPTH = 12

_MANY = 256
"""Of longer containers, only so many items are looked at, evenly spread."""

_ATOMS = (str, bytes, bytearray, int, float, complex, type(None), type, ModuleType)
_NOTHING_INSIDE = (np.ndarray, np.generic, io.IOBase, threading.Thread, logging.Logger, BuiltinFunctionType)
"""What these hold is their own business, or, for a logger, that of the whole process."""
_SLOTS_OF: dict[type, tuple[str, ...]] = {
    MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords"),
    FunctionType: ("__closure__", "__defaults__"),
    CellType: ("cell_contents",),
}
"""Where functions hold the objects that they use."""


def walk(root: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, object) for `root` and what it holds, each object once, nearest first."""
    seen: dict[int, object] = {}  # keeps them alive, so that ids stay unique
    to_see: deque[tuple[str, Any, int]] = deque([(path, root, 0)])
    while to_see and len(seen) < _MAX_OBJECTS:
        path, thing, depth = to_see.popleft()
        if id(thing) in seen or isinstance(thing, _ATOMS):
            continue
        seen[id(thing)] = thing
        yield path, thing
        if depth < _MAX_DEPTH and not isinstance(thing, _NOTHING_INSIDE):
            to_see.extend((path + step, part, depth + 1) for step, part in _held_by(thing))


def _held_by(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield (step, part) for items, attributes and slots, also of functions. Of many items, only some."""
    if isinstance(thing, Mapping) and type(thing).__module__ != "os":
        yield from ((f"[{key!r}]", value) for key, value in _evenly(thing.items(), len(thing)))
    elif isinstance(thing, (list, tuple, deque)):
        yield from ((f"[{number}]", item) for number, item in _evenly(enumerate(thing), len(thing)))
    elif isinstance(thing, (set, frozenset)):
        yield from (("{...}", item) for item in _evenly(thing, len(thing)))
    if type(thing).__module__.partition(".")[0] not in {"pandas", "pyarrow"}:  # tables are looked at by column
        slots = [vars(kind).get("__slots__", ()) for kind in type(thing).__mro__]
        slots += (names for kind, names in _SLOTS_OF.items() if isinstance(thing, kind))
        names = [name for one in slots for name in ([one] if isinstance(one, str) else one)]
        attributes = {name: getattr(thing, name, None) for name in names} | getattr(thing, "__dict__", {})
        yield from [(f".{name}", part) for name, part in attributes.items()]


def _evenly(items: Iterable[Any], length: int) -> list[Any]:
    """Return some of the items, evenly spread; all of them if there are few. Copies no others."""
    return list(islice(items, 0, None, -(-length // _MANY) or 1))
