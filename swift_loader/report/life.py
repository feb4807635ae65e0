"""How long each part of a batch's life took. Pure.

sent ─► began ─fetch─► ─collate─► ─encode─► built ─► received ─decode─► ready ─► its turn ─► delivered
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from swift_loader.metrics.observations import Observations, are_of_one_pass

__all__ = ["Life", "Seconds", "steady"]

Seconds = NDArray[np.float64]
"""`(n,)`, one of each batch."""

_S_PER_NS = 1e-9


@dataclass(frozen=True, slots=True)
class Life:
    """The times of n delivered batches, in the order of their delivery. All fields are `(n,)`, in seconds."""

    began: Seconds
    """When, since the first of all these times."""
    fetch: Seconds
    collate: Seconds
    encode: Seconds
    cpu: Seconds
    """CPU time of the worker."""
    run_delay: Seconds
    """How long the worker was ready to run, but had no core. NaN: not measured."""
    idle: Seconds
    """From the end of the worker's batch before to the beginning of this one. NaN: the worker's first one."""
    transport: Seconds
    decode: Seconds
    order: Seconds
    """From ready to its turn: all batches before it are ready."""
    pickup: Seconds
    """From its turn, or from when the loop asked if that is later, to its delivery. Without the copy."""
    queued: Seconds
    """From its turn to when the loop asked."""
    copy: Seconds
    waited: Seconds
    """How long the loop waited in `next`."""
    step: Seconds
    """From the delivery to when the loop asked for the next one. NaN: the last one of an epoch."""

    @property
    def service(self) -> Seconds:
        """How long the worker was at the batch."""
        return self.fetch + self.collate + self.encode

    @property
    def known_run_delay(self) -> Seconds:
        """The run delay; where it wasn't measured, the same share of the CPU time as elsewhere."""
        known = np.isfinite(self.run_delay)
        cpu = float(self.cpu[known].sum())
        share = float(self.run_delay[known].sum()) / cpu if cpu > 0 else 0.0
        return np.where(known, self.run_delay, share * self.cpu)

    @classmethod
    def of(cls, observations: Observations) -> Life:
        """Return the lives of the batches in the observations."""
        batches = observations.batches
        fetch, collate, encode = (batches[name] * _S_PER_NS for name in ("fetch_ns", "collate_ns", "encode_ns"))
        zero = _first_time(batches)
        began, received, asked, delivered = (
            (batches[name] - zero) * _S_PER_NS for name in ("began_ns", "received_ns", "asked_ns", "delivered_ns")
        )
        built = began + fetch + collate + encode
        decode, copy = batches["decode_ns"] * _S_PER_NS, batches["copy_ns"] * _S_PER_NS
        ready = np.where(batches["received_ns"] > 0, np.minimum(received + decode, delivered), delivered)
        turn = np.maximum.accumulate(ready) if observations.setup.in_order else ready
        before = _end_before(batches["worker_id"], began, built)
        delay = batches["run_delay_ns"]
        return cls(
            began=began,
            fetch=fetch,
            collate=collate,
            encode=encode,
            cpu=batches["cpu_ns"] * _S_PER_NS,
            run_delay=np.where(delay < 0, np.nan, delay * _S_PER_NS),
            idle=np.maximum(0, began - before),
            transport=np.where(batches["received_ns"] > 0, np.maximum(0, received - built), 0),
            decode=decode,
            order=np.maximum(0, turn - ready),
            pickup=np.maximum(0, delivered - np.maximum(asked, turn) - copy),
            queued=np.maximum(0, asked - turn),
            copy=copy,
            waited=np.maximum(0, delivered - asked),
            step=_steps(are_of_one_pass(batches), asked, delivered),
        )


def steady(observations: Observations) -> Observations:
    """Return the observations without the batches of the start, which waited for workers to start."""
    batches = observations.batches
    if observations.num_delivered > len(batches):
        return observations
    num_first = min(observations.setup.num_workers + 1, len(batches) // 2)
    return replace(observations, batches=batches[num_first:])


def _first_time(batches: NDArray[np.void]) -> int:
    """Return the time that all others are counted from, so that they keep their precision as floats."""
    measured = [batches[name][batches[name] > 0] for name in ("began_ns", "asked_ns")]
    return min((int(times.min()) for times in measured if times.size), default=0)


def _end_before(worker_id: NDArray[np.int32], began: Seconds, built: Seconds) -> Seconds:
    """Return when the worker of each batch had built its batch before. NaN: it is the first one."""
    order = np.lexsort((began, worker_id))
    ends = np.full(len(began), np.nan)
    same = worker_id[order[1:]] == worker_id[order[:-1]]
    ends[order[1:][same]] = built[order[:-1][same]]
    return ends


def _steps(of_one_pass: NDArray[np.bool_], asked: Seconds, delivered: Seconds) -> Seconds:
    steps = np.full(len(asked), np.nan)
    if len(asked) > 1:
        steps[:-1] = np.where(of_one_pass, np.maximum(0, asked[1:] - delivered[:-1]), np.nan)
    return steps
