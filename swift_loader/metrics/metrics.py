"""Measures the batches of a loader, in O(1) memory: each stage of a batch, the slowest samples, the waits of the loop.

    a receiver's thread     note_arrival ──► Arrival, which travels with its batch
    the loop's thread       note_asked, note_delivery; note_copy, or the one that moves

So no look-up matches what a batch was measured in the workers with when the loop got it, and a batch that is dropped on
the way leaves nothing behind. All of it takes about a microsecond per batch.
"""

from __future__ import annotations

import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.metrics.observations import BATCH, Arrival, Observations, Setup, SlowSample, stage_times
from swift_loader.runtime import ProcessOwner
from swift_loader.scheduler.messages import Send
from swift_loader.transport.messages import Batch

NOT_NOTED = -1
"""Stands for the number of a batch that isn't in the timeline."""

_MAX_PUT_ASIDE = 1024
"""Rows that aren't counted in the histograms yet. Counting one by one would cost 3 % of a small batch."""


_NS_PER_READING = 1_000_000
"""CPU time is read at most so often, because that is a system call of half a microsecond."""


class Metrics:
    """What is measured of a loader. Thread-safe, apart from what the loop's thread calls.

    A pass begins with its first `next`. It ends with its last one: the `next` that met the end, or else the last that
    gave a batch. What the process does between two passes, such as validation, doesn't count.
    """

    STAGES = ("read", "fetch", "collate", "encode", "decode", "wait")
    """In the worker: wait for reads of a mapped dataset, fetch the samples without that, collate them, copy what isn't
    in the slot yet. In the trainer: make views of the slot; wait for the batch."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._lock = threading.RLock()
        """Guards the histograms, the sums and the slowest samples."""
        self._process = ProcessOwner()
        clocks = {time.get_clock_info(name).implementation for name in ("perf_counter", "monotonic")}
        self._clock_offset_ns = 0 if len(clocks) == 1 else time.perf_counter_ns() - time.monotonic_ns()
        """What `time.perf_counter_ns` is ahead of `time.monotonic`, which the scheduler uses. 0 on Linux."""
        self._timeline = Timeline()
        self.is_in_pass = False
        """Whether a pass has begun and not ended. The loop's thread sets it, and the next six."""
        self._num_passes = 0
        """How many passes have begun."""
        self._last_ns = 0
        """The end of the pass's last `next`; before that, when it began."""
        self._elapsed_ns = 0
        """How long all passes have lasted."""
        self._cpu_ns = 0
        """CPU time of the process in them, over all threads. Up to 1 ms of each pass may be missing."""
        self._cpu_last_ns = 0
        """The CPU time that was read last."""
        self._read_again_ns = 0
        """When the CPU time is read next."""
        self._slowest = Slowest()
        self._stages = {name: Histogram() for name in self.STAGES}
        self._num_counted = 0
        """Rows of the timeline that are in the histograms and in the next two sums."""
        self._num_samples = 0
        self._num_ready = 0
        self._built: list[int] = []
        """How many samples each batch has that has arrived and isn't in the next two sums. Appending is atomic."""
        self._num_built = 0
        self._num_samples_built = 0
        self._num_restarts = 0
        self._waited_in_vain_ns = 0
        """In each `next` that gave no batch."""

    # Receivers' threads

    def note_arrival(
        self, batch: Batch, task: Send, worker_id: int, received_ns: int, decode_ns: int
    ) -> Arrival | None:
        """Record a batch whose announcement was there at `received_ns`. Any thread.

        Return what `note_delivery` needs; None if measuring is off.
        """
        if not self._enabled:
            return None
        work = task.work
        self._built.append(batch.num_samples)
        epoch = work.epoch
        if batch.slow_ns > self._slowest.floor_ns:
            with self._lock:
                self._slowest.note(batch.slow_index, batch.slow_ns, epoch)
        return (
            epoch,
            work.step,
            worker_id,
            batch.num_samples,
            batch.used_nbytes,
            int(task.sent_s * 1e9) + self._clock_offset_ns,
            batch.began_ns,
            batch.fetch_ns,
            batch.collate_ns,
            batch.encode_ns,
            batch.read_ns,
            batch.reading_ns,
            batch.cpu_ns,
            batch.run_delay_ns,
            received_ns,
            decode_ns,
        )

    # The loop's thread

    def note_asked(self, asked_ns: int) -> None:
        """Record that the loop asks for a batch. The first time, a pass begins."""
        if self._enabled and not self.is_in_pass:
            self._last_ns = asked_ns
            self._cpu_last_ns = time.process_time_ns()
            self._read_again_ns = asked_ns + _NS_PER_READING
            self._num_passes += 1
            self.is_in_pass = True

    def note_delivery(self, arrival: Arrival | None, asked_ns: int, delivered_ns: int, num_ready: int) -> int:
        """Record what the loop got, and how many batches were ready when it asked. Return a number for `note_copy`.

        Without an arrival, the loop got no batch.
        """
        if not self._enabled:
            return NOT_NOTED
        self._elapsed_ns += delivered_ns - self._last_ns
        self._last_ns = delivered_ns
        if delivered_ns >= self._read_again_ns:
            self._read_cpu(delivered_ns)
        if arrival is None:
            self._waited_in_vain_ns += delivered_ns - asked_ns
            return NOT_NOTED
        number = self._timeline.add(arrival, asked_ns, delivered_ns, num_ready, self._num_passes)
        if number - self._num_counted >= _MAX_PUT_ASIDE:
            self._count()
        return number

    def note_inline(self, epoch: int, step: int, num_samples: int, asked_ns: int, began_ns: int, cpu_ns: int) -> int:
        """Record a batch that the loop's thread has just built, in one go: all counts as fetching.

        `cpu_ns`: the thread's CPU time when it began. Return a number for `note_copy`.
        """
        if not self._enabled:
            return NOT_NOTED
        self._built.append(num_samples)
        now_ns = time.perf_counter_ns()
        built = (asked_ns, began_ns, now_ns - began_ns, 0, 0, 0, 0, time.thread_time_ns() - cpu_ns, -1, now_ns, 0)
        return self.note_delivery((epoch, step, 0, num_samples, 0, *built), asked_ns, now_ns, 0)

    def note_copy(self, number: int, copy_ns: int) -> None:
        """Record how long it took to start the copy of a batch to the device. The thread that moved it."""
        if number != NOT_NOTED:
            self._timeline.set_copy(number, copy_ns)

    def end_pass(self, now_ns: int | None = None) -> None:
        """Record that the loop met the end of its pass. None: it has left it, some time after its last `next`."""
        if self.is_in_pass and now_ns is not None:
            self._elapsed_ns += now_ns - self._last_ns
            self._read_cpu(now_ns)
        self.is_in_pass = False
        if len(self._built) >= _MAX_PUT_ASIDE:  # most of them were dropped
            self._count()

    def _read_cpu(self, now_ns: int) -> None:
        before_ns, self._cpu_last_ns = self._cpu_last_ns, time.process_time_ns()
        self._cpu_ns += max(0, self._cpu_last_ns - before_ns)  # in a fork, the clock began again
        self._read_again_ns = now_ns + _NS_PER_READING

    # Any thread

    @property
    def elapsed_s(self) -> float:
        """How long all passes have lasted."""
        return self._elapsed_ns / 1e9

    def note_restart(self) -> None:
        """Count a process that was replaced."""
        with self._lock:
            self._num_restarts += 1

    def report(self) -> dict[str, Any]:
        """Return counts and times, as plain JSON types. Return an empty dict if measuring is off."""
        if not self._enabled:
            return {}
        self._renew_lock_in_fork()
        with self._lock:
            self._count()
            num_delivered = self._stages["wait"].count
            return {
                "batches_built": self._num_built,
                "batches_delivered": num_delivered,
                "samples_built": self._num_samples_built,
                "worker_restarts": self._num_restarts,
                "mean_batches_ready": self._num_ready / max(1, num_delivered),
                "stages": {name: histogram.summary() for name, histogram in self._stages.items()},
            }

    def observations(self, setup: Setup) -> Observations:
        """Return what was measured up to now. Without batches if measuring is off."""
        self._renew_lock_in_fork()
        with self._lock:
            self._count()
            return self._observations(setup, self._timeline.since(0), self._slowest.samples())

    def recent(self, setup: Setup, num_batches: int) -> Observations:
        """Return the same of the last batches only, without the slowest samples: takes some 50 µs."""
        self._renew_lock_in_fork()
        with self._lock:
            return self._observations(setup, self._timeline.since(self._timeline.num_added - num_batches), ())

    def _observations(self, setup: Setup, batches: NDArray[np.void], slowest: tuple[SlowSample, ...]) -> Observations:
        waits, uncounted = self._stages["wait"], self._timeline.since(self._num_counted)
        waited_ns = waits.total_ns + int((uncounted["delivered_ns"] - uncounted["asked_ns"]).sum())
        return Observations(
            setup=setup,
            batches=batches,
            slowest=slowest,
            num_delivered=waits.count + len(uncounted),
            num_samples=self._num_samples + int(uncounted["num_samples"].sum()),
            elapsed_s=self.elapsed_s,
            waited_s=(waited_ns + self._waited_in_vain_ns) / 1e9,
            trainer_cpu_s=self._cpu_ns / 1e9,
            num_restarts=self._num_restarts,
        )

    def _renew_lock_in_fork(self) -> None:
        if not self._process.is_here():  # the thread that may hold the lock doesn't exist here
            self._lock, self._process = threading.RLock(), ProcessOwner()

    def _count(self) -> None:
        """Count the rows and batches that aren't in the histograms and sums yet."""
        with self._lock:
            rows = self._timeline.since(self._num_counted)
            self._num_counted += len(rows)
            times = stage_times(rows)
            for name, histogram in self._stages.items():
                histogram.note_all(times[name])
            self._num_samples += int(rows["num_samples"].sum())
            self._num_ready += int(rows["num_ready"].sum())
            num_built = len(self._built)
            self._num_built += num_built
            self._num_samples_built += sum(self._built[:num_built])
            del self._built[:num_built]


CAPACITY = 4096
"""Rows that are kept."""

_ROW = struct.Struct("<qqiiqqqqqqqqqqqqqqiiq")
"""The layout of `BATCH`, which has no padding."""


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
        self._copies = self._rows["copy_ns"]

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
            self._copies[number % CAPACITY] = copy_ns

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


_EDGES_NS: NDArray[np.float64] = np.geomspace(1.0, 2.0**63, 256)
"""Upper edges of the buckets. Each is 19 % above the one before, so quantiles are accurate to 20 %."""

_NS_PER_MS = 1e6


@dataclass(slots=True)
class Histogram:
    """Durations in nanoseconds, in O(1) memory: buckets grow with the duration."""

    count: int = 0
    total_ns: int = 0
    max_ns: int = 0
    _buckets: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(_EDGES_NS), np.int64))

    def note_all(self, durations_ns: NDArray[np.int64]) -> None:
        """Count `(n,)` durations. Far cheaper than counting them one by one."""
        if not durations_ns.size:
            return
        self.count += durations_ns.size
        self.total_ns += sum(durations_ns.tolist())
        self.max_ns = max(self.max_ns, int(durations_ns.max()))
        self._buckets += np.bincount(np.searchsorted(_EDGES_NS, durations_ns), minlength=len(_EDGES_NS))

    def quantile_ns(self, share: float) -> float:
        """Return the quantile of the durations at `share`, from 0 to 1. Return 0 if there are none."""
        if not self.count:
            return 0.0
        bucket = int(np.searchsorted(np.cumsum(self._buckets), share * self.count))
        return min(float(_EDGES_NS[bucket]), self.max_ns)

    def summary(self) -> dict[str, float]:
        """Return mean, p50, p99 and max in milliseconds, and the total in seconds."""
        return {
            "mean_ms": self.total_ns / max(1, self.count) / _NS_PER_MS,
            "p50_ms": self.quantile_ns(0.5) / _NS_PER_MS,
            "p99_ms": self.quantile_ns(0.99) / _NS_PER_MS,
            "max_ms": self.max_ns / _NS_PER_MS,
            "total_s": self.total_ns / 1e9,
        }
