"""What was measured of a loader, as a value: the input of reports, plots and traces. Pure.

All clock readings are of `time.perf_counter_ns`, which all processes of a machine share.

    sent ─► began ─fetch─► ─collate─► ─encode─► built ─► received ─decode─► ready ─► delivered ─► the next `next`
    trainer  worker                              worker   trainer            trainer  loop          loop
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["BATCH", "Observations", "Setup", "SlowSample", "are_of_one_pass"]

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


def are_of_one_pass(batches: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return for each batch but the first whether it is of the same pass as the one before."""
    same: NDArray[np.bool_] = (np.diff(batches["epoch"]) == 0) & (np.diff(batches["pass_number"]) == 0)
    return same


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
    loading_rank: int | None = None
    """The rank that loads for this one, by its workers. None: this one does."""
    num_remote: int = 0
    """How many of the workers are Ray actors, whose cores aren't this machine's."""


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
