"""What was measured of a loader, as a value: the input of reports, plots and traces; and what collects it. Pure.

All clock readings are of `time.perf_counter_ns`, which all processes of a machine share.

    sent ─► began ─fetch─► ─collate─► ─encode─► built ─► received ─decode─► ready ─► delivered ─► the next `next`
    trainer  worker                              worker   trainer            trainer  loop          loop
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

BATCH = np.dtype(
    [
        ("epoch", np.int64),
        ("step", np.int64),  # of the epoch; with a sampler, the number of the batch
        ("worker_id", np.int32),  # which of the n workers, from 0
        ("num_samples", np.int32),
        ("nbytes", np.int64),  # bytes of the batch's bulk data in its slot; 0: it travelled in the message
        ("sent_ns", np.int64),  # when the task was given to the worker
        ("began_ns", np.int64),  # when the worker began it
        ("fetch_ns", np.int64),  # getting the samples from the dataset
        ("collate_ns", np.int64),
        ("encode_ns", np.int64),
        ("cpu_ns", np.int64),  # CPU time of the worker, from the end of its batch before to the end of this one
        ("run_delay_ns", np.int64),  # in that time, how long it was ready to run, but had no core; -1: not measured
        ("received_ns", np.int64),  # when the trainer had its announcement
        ("decode_ns", np.int64),  # making views of the slot
        ("asked_ns", np.int64),  # when the loop asked for this batch
        ("delivered_ns", np.int64),  # when it got it
        ("num_ready", np.int32),  # how many batches were ready when it asked
        ("pass_number", np.int32),  # counts the passes of the loop; two may be over the same epoch
        ("copy_ns", np.int64),  # time of the loop's thread for starting the copy to the device; 0: no device
    ]
)
"""One delivered batch. A field that wasn't measured is 0, unless it says otherwise."""


Arrival = tuple[int, ...]
"""The fields of `BATCH` up to `decode_ns`, in that order: what is known once a batch has arrived in the trainer."""


def build_ns(batches: Any) -> Any:
    """Return how long a worker was at each batch. `batches` is an array, a row of it, or a dict with its fields."""
    return batches["fetch_ns"] + batches["collate_ns"] + batches["encode_ns"]


def are_of_one_pass(batches: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return for each batch but the first whether it is of the same pass as the one before."""
    same: NDArray[np.bool_] = (np.diff(batches["epoch"]) == 0) & (np.diff(batches["pass_number"]) == 0)
    return same


def steps_ns(batches: NDArray[np.void]) -> NDArray[np.int64]:
    """Return how long the loop was at a batch before it asked for the next one. The last one of a pass is left out."""
    between = batches["asked_ns"][1:] - batches["delivered_ns"][:-1]
    steps: NDArray[np.int64] = np.maximum(0, between[are_of_one_pass(batches)])
    return steps


@dataclass(frozen=True, slots=True)
class SlowSample:
    """A sample that took long to fetch."""

    index: int
    """Its dataset index."""
    seconds: float
    epoch: int


@dataclass(frozen=True, slots=True)
class Setup:
    """What the loader and the machine have."""

    num_workers: int
    """Workers now. 0: batches are built in the loop's thread."""
    max_in_flight: int
    """Batches that may be built or wait for the loop."""
    is_in_flight_chosen: bool
    """Whether that number follows from the number of workers, because the user gave none."""
    in_order: bool
    batch_size: int
    worker_type: str
    """`"process"` or `"thread"`."""
    num_cores: float
    """Cores that the trainer and its workers may use: the affinity, and the cgroup's quota."""
    world_size_here: int
    """Ranks on this machine, which share the cores. 1 if unknown."""
    has_device: bool
    num_remote: int = 0
    """How many of the workers are Ray actors, whose cores aren't this machine's."""

    @property
    def cores_per_rank(self) -> float:
        """Cores of this rank: the ranks of a machine share them evenly."""
        return self.num_cores / max(1, self.world_size_here)


@dataclass(frozen=True, slots=True)
class Observations:
    """What was measured of a loader, up to now."""

    setup: Setup
    batches: NDArray[np.void]
    """The last delivered batches, oldest first, of dtype `BATCH`. At most 4,096."""
    slowest: tuple[SlowSample, ...]
    """The slowest samples of the run, slowest first, at most 20, each index once."""
    num_delivered: int
    """Batches that the loop got since the loader started, also those that aren't in `batches` any more."""
    num_samples: int
    """Samples in them."""
    elapsed_s: float
    """From the first `next` of a pass to its last, over all passes: time between two passes doesn't count."""
    waited_s: float
    """How long of that the loop waited in `next`."""
    trainer_cpu_s: float
    """CPU time of the trainer's process in `elapsed_s`, over all its threads."""
    num_restarts: int
    """Workers that were replaced."""
    totals: dict[str, dict[str, float]]
    """By stage (fetch, collate, encode, decode, wait): mean_ms, p50_ms, p99_ms, max_ms and total_s of the whole run."""


CAPACITY = 4096
"""Rows that are kept."""

_ROW = struct.Struct("<qqiiqqqqqqqqqqqqiiq")
"""The layout of `BATCH`, which has no padding."""

_COPY = struct.Struct("<q")
_COPY_OFFSET: int = BATCH.fields["copy_ns"][1] if BATCH.fields is not None else 0


class Timeline:
    """The last `CAPACITY` batches that the loop got, in a ring.

    A row is written with one `struct.pack_into`, which takes 0.4 us. Collecting tuples in a list and converting them
    many at a time takes as long, and holds Python objects for each batch.

    One thread at a time adds rows. Any thread may read: it gets whole rows, because adding one holds the GIL.
    """

    def __init__(self) -> None:
        self.num_added = 0
        """Rows that were ever added. The next one has this number."""
        self._rows: NDArray[np.void] = np.zeros(CAPACITY, BATCH)
        self._memory = self._rows.view(np.uint8).data

    def add(self, arrival: Arrival, asked_ns: int, delivered_ns: int, num_ready: int, pass_number: int) -> int:
        """Add a row, in place of the oldest one if the ring is full. Return its number. It has no copy yet."""
        number = self.num_added
        offset = number % CAPACITY * _ROW.size
        _ROW.pack_into(self._memory, offset, *arrival, asked_ns, delivered_ns, num_ready, pass_number, 0)
        self.num_added = number + 1
        return number

    def set_copy(self, number: int, copy_ns: int) -> None:
        """Set how long the copy to the device took. Does nothing if the row isn't there any more."""
        if number >= self.num_added - CAPACITY:
            _COPY.pack_into(self._memory, number % CAPACITY * _ROW.size + _COPY_OFFSET, copy_ns)

    def since(self, number: int) -> NDArray[np.void]:
        """Return a copy of the rows from this number on, oldest first; of those that are still there."""
        end = self.num_added
        first = min(max(number, end - CAPACITY, 0), end)
        begin, stop = first % CAPACITY, end % CAPACITY
        rows = self._rows
        parts = [rows[begin:stop]] if begin < stop or first == end else [rows[begin:], rows[:stop]]
        joined: NDArray[np.void] = np.concatenate(parts)
        return joined


NUM_SLOWEST = 20


class Slowest:
    """The `NUM_SLOWEST` samples with the longest times, each dataset index once. Not thread-safe."""

    def __init__(self) -> None:
        self.floor_ns = 0
        """A sample that took no longer isn't kept. The caller looks here first, because most aren't."""
        self._by_index: dict[int, tuple[int, int]] = {}
        """Dataset index -> (ns, epoch)."""

    def note(self, index: int, took_ns: int, epoch: int) -> None:
        """Record how long a sample took. Of several times of one sample, the longest counts."""
        kept = self._by_index
        before = kept.get(index)
        if before is not None and took_ns <= before[0]:
            return
        kept[index] = (took_ns, epoch)
        if len(kept) > NUM_SLOWEST:
            del kept[min(kept, key=lambda each: kept[each][0])]
        if len(kept) == NUM_SLOWEST:
            self.floor_ns = min(took_ns for took_ns, _ in kept.values())

    def samples(self) -> tuple[SlowSample, ...]:
        """Return them, slowest first."""
        ordered = sorted(self._by_index.items(), key=lambda item: -item[1][0])
        return tuple(SlowSample(index, took_ns / 1e9, epoch) for index, (took_ns, epoch) in ordered)


_SUBDIVISIONS = 4
"""Buckets per power of two. Quantiles are accurate to 20 %."""

_NUM_BUCKETS = 64 * _SUBDIVISIONS

_NS_PER_MS = 1e6


@dataclass(slots=True)
class Histogram:
    """Durations in nanoseconds, in O(1) memory: buckets grow with the duration."""

    count: int = 0
    total_ns: int = 0
    max_ns: int = 0
    _buckets: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_NUM_BUCKETS, np.int64))

    def note_all(self, durations_ns: NDArray[np.int64]) -> None:
        """Count `(n,)` durations. Far cheaper than counting them one by one."""
        if not durations_ns.size:
            return
        self.count += durations_ns.size
        self.total_ns += sum(durations_ns.tolist())
        self.max_ns = max(self.max_ns, int(durations_ns.max()))
        self._buckets += np.bincount(_buckets_of(durations_ns), minlength=_NUM_BUCKETS)

    def quantile_ns(self, share: float) -> float:
        """Return the quantile of the durations at `share`, from 0 to 1. Return 0 if there are none."""
        wanted, seen = share * self.count, 0
        for bucket, number in enumerate(self._buckets.tolist()):
            seen += number
            if number and seen >= wanted:
                return min(_upper_edge_ns(bucket), self.max_ns)
        return 0.0

    def summary(self) -> dict[str, float]:
        """Return mean, p50, p99 and max in milliseconds, and the total in seconds."""
        return {
            "mean_ms": self.total_ns / max(1, self.count) / _NS_PER_MS,
            "p50_ms": self.quantile_ns(0.5) / _NS_PER_MS,
            "p99_ms": self.quantile_ns(0.99) / _NS_PER_MS,
            "max_ms": self.max_ns / _NS_PER_MS,
            "total_s": self.total_ns / 1e9,
        }


def _buckets_of(durations_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    durations_ns = np.maximum(durations_ns, 0)
    exponents = np.frexp(durations_ns.astype(np.float64))[1].astype(np.int64) - 1
    exponents -= durations_ns < np.left_shift(1, np.maximum(exponents, 0))  # rounded up to the next power of two
    parts = np.right_shift(durations_ns, np.maximum(exponents - 2, 0)) % _SUBDIVISIONS
    buckets = np.where(durations_ns < _SUBDIVISIONS, durations_ns, (exponents - 1) * _SUBDIVISIONS + parts)
    return np.minimum(buckets, _NUM_BUCKETS - 1)


def _upper_edge_ns(bucket: int) -> float:
    if bucket < _SUBDIVISIONS:
        return float(bucket)
    exponent, part = divmod(bucket, _SUBDIVISIONS)
    return 2.0 ** (exponent + 1) * (1 + (part + 1) / _SUBDIVISIONS)
