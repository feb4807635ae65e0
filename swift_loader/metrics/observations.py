"""What was measured of a loader, as a value: the input of reports, plots, traces, dashboards and the tuner. Pure.

All clock readings are of `time.perf_counter_ns`, which all processes of a machine share.

    sent ─► began ─read─► ─fetch─► ─collate─► ─encode─► built ─► received ─decode─► ready ─► delivered ─► next `next`
    trainer  worker                                     worker   trainer            trainer  loop         loop
"""

from __future__ import annotations

from dataclasses import dataclass

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
        ("read_ns", np.int64),  # how long fetching waited for reads of a mapped dataset
        ("reading_ns", np.int64),  # how long those reads took, in sum: several at a time, and some before the batch
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


Durations = NDArray[np.int64]
"""`(n,)`, in nanoseconds, one of each batch."""

Arrival = tuple[int, ...]
"""The fields of `BATCH` up to `decode_ns`, in that order: what is known once a batch has arrived in the trainer."""


WORKER, TRAINER, NOBODY = "worker", "trainer", "nobody"

LIFE = {
    "read": WORKER,
    "fetch": WORKER,
    "collate": WORKER,
    "encode": WORKER,
    "transport": NOBODY,
    "decode": TRAINER,
    "delivery order": NOBODY,
    "wait for the loop": NOBODY,
    "copy to device": TRAINER,
    "handing over": TRAINER,
}
"""The stages of a batch's life, in their order, and who is at the batch."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a batch's life."""

    name: str
    p50_s: float
    p99_s: float
    share: float
    """Share of the time from the start of a batch to its delivery, over all batches, from 0 to 1."""
    who: str
    """Who is at the batch: `"worker"`, `"trainer"`, or `"nobody"`, because the batch waits."""


def stage_times(batches: NDArray[np.void], *, in_order: bool = True) -> dict[str, Durations]:
    """Return how long each batch was in each stage of its life, in nanoseconds, by the stage's name.

    All that tells times of stages reads them here. Beside those that follow one another in a batch's life, there are
    `build`, all that the worker did, and `wait`, how long the loop waited for the batch.
    """
    began, received, asked, delivered = (batches[f"{name}_ns"] for name in ("began", "received", "asked", "delivered"))
    times = {stage: batches[f"{stage}_ns"] for stage in ("read", "fetch", "collate", "encode", "decode")}
    times["build"] = times["fetch"] + times["collate"] + times["encode"]
    times["fetch"] = times["fetch"] - times["read"]
    is_measured = (began > 0) & (received > 0)
    ready = np.where(received > 0, np.minimum(received + times["decode"], delivered), delivered)
    turn = np.maximum.accumulate(ready) if in_order else ready  # all batches before it are ready
    times |= {
        "wait": delivered - asked,
        "transport": np.where(is_measured, received - began - times["build"], 0),
        "delivery order": turn - ready,
        "wait for the loop": asked - turn,
        "copy to device": batches["copy_ns"],
        "handing over": delivered - np.maximum(asked, turn) - batches["copy_ns"],
    }
    return {stage: np.maximum(durations, 0) for stage, durations in times.items()}


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
    """Whether that number follows from the number of workers, because you gave none."""
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
    run_delay_ratio: float = 0.0
    """How long the trainer's main thread waits for a core, per second that it runs. 0: unknown, or not needed."""

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
    """Seconds from the first `next` of a pass to its last, over all passes. Time between passes doesn't count."""
    waited_s: float
    """Seconds of that in which the loop waited in `next`."""
    trainer_cpu_s: float
    """CPU seconds of the trainer's process in `elapsed_s`, over all its threads."""
    num_restarts: int
    """Workers that were replaced."""


WINDOW = 512
"""Batches that make up the recent past of dashboards."""

_FIGURES = ("batches_per_s", "samples_per_s", "wait_share", "ready_mean", "num_workers")
_STAGES = ("read", "fetch", "collate", "encode", "transport", "decode", "wait")
_SHARES = (0.5, 0.99)
_QUANTILES = tuple(f"{stage}_ms_{name}" for stage in _STAGES for name in ("p50", "p99"))
_TOTALS = ("batches_total", "samples_total", "waited_s_total", "elapsed_s_total", "restarts_total")

NAMES = (*_FIGURES, *_QUANTILES, *_TOTALS)
"""All keys of `flat_metrics`, without the prefix."""


def flat_metrics(observations: Observations | None, prefix: str = "swift_loader/") -> dict[str, float]:
    """Return figures of the last 512 batches, and counts since the loader started. Takes about 0.1 ms.

    The keys are always the same. Without any batch, the figures are 0; None is a loader that hasn't started.
    """
    if observations is None:
        return dict.fromkeys((prefix + name for name in NAMES), 0.0)
    batches = observations.batches[-WINDOW:]
    times = stage_times(batches)
    waited_ns = int(times["wait"].sum())
    run_s = (waited_ns + int(steps_ns(batches).sum())) / 1e9 or float("inf")
    figures = (
        len(batches) / run_s,
        int(batches["num_samples"].sum()) / run_s,
        waited_ns / 1e9 / run_s,
        int(batches["num_ready"].sum()) / max(1, len(batches)),
        observations.setup.num_workers,
        *_quantiles_ms(np.stack([times[stage] for stage in _STAGES])),
        observations.num_delivered,
        observations.num_samples,
        observations.waited_s,
        observations.elapsed_s,
        observations.num_restarts,
    )
    return {prefix + name: float(figure) for name, figure in zip(NAMES, figures, strict=True)}


def _quantiles_ms(times: NDArray[np.int64]) -> list[float]:
    """Return quantiles of each row. Each is a time that a batch had, not one between two."""
    num_batches = times.shape[1]
    if not num_batches:
        return [0.0] * len(_QUANTILES)
    times.sort(axis=1)
    places = [int(share * (num_batches - 1) + 0.5) for share in _SHARES]
    quantiles: list[float] = (times[:, places] / 1e6).ravel().tolist()
    return quantiles
