"""What Ray does with the answer of an actor, taken apart. One call at a time, without a loader.

    actor: built ─serialise─► ─put─► in its store ─notice─► known ─transfer─► in the trainer's store ─view─► seen

What Ray does between `built` and `known` can't be looked into. So `notice` is that time for an answer without a batch,
and `put` is what an answer with one takes longer. A small batch comes with the answer: then `put` is its way, and there
is no transfer.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_loader.executors.ray.fleet import MAX_INLINE_BYTES
from swift_loader.worker.actor import Reply

PHASES = ("serialise", "put", "notice", "transfer", "view")
_NUM_WARMING = 5
_MESSAGE_NBYTES = 300
"""A batch's announcement and its header, about."""


class Sender:
    """An actor that answers as those of a loader do, and notes when."""

    def __init__(self, nbytes: int) -> None:
        self._memory = np.ones(nbytes, np.uint8)

    def answer(self, *, is_empty: bool) -> Reply:
        """Return a batch, or none, and in its messages when it was built."""
        messages = [b"\0" * _MESSAGE_NBYTES, time.perf_counter_ns().to_bytes(8, "little")]
        return Reply(messages, None if is_empty else self._memory)

    def serialise_ns(self) -> int:
        """Return how long it takes to serialise a batch, as Ray does it."""
        from ray import cloudpickle

        answer = self.answer(is_empty=False)
        start_ns = time.perf_counter_ns()
        cloudpickle.dumps(answer, protocol=5, buffer_callback=lambda _: None)
        return time.perf_counter_ns() - start_ns


class _Followed(NamedTuple):
    """The nanoseconds of an answer's way."""

    known: int
    """From when it was built until the trainer knew of it."""
    transfer: int
    view: int


def measure_phases(ray: Any, place: str, nbytes: int, count: int) -> dict[str, list[float]]:
    """Return the seconds of each phase, for `count` batches from a node."""
    variables = {"RAY_max_direct_call_object_size": str(MAX_INLINE_BYTES)}  # as for the actors of a loader
    options = {"num_cpus": 1, "resources": {place: 1}, "runtime_env": {"env_vars": variables}}
    actor = ray.remote(Sender).options(**options).remote(nbytes)
    rows = []
    try:
        for _ in range(_NUM_WARMING):
            _follow(ray, actor, is_empty=False)
        for _ in range(count):
            serialise = ray.get(actor.serialise_ns.remote())
            rows.append((serialise, _follow(ray, actor, is_empty=True), _follow(ray, actor, is_empty=False)))
    finally:
        ray.kill(actor)
    notice = statistics.median(empty.known for _, empty, _ in rows)
    spans_ns = [(pickled, full.known - pickled - notice, notice, *full[1:]) for pickled, _, full in rows]
    return {name: [max(0, spans[number]) / 1e9 for spans in spans_ns] for number, name in enumerate(PHASES)}


def _follow(ray: Any, actor: Any, *, is_empty: bool) -> _Followed:
    reference = actor.answer.remote(is_empty=is_empty)
    ray.wait([reference], fetch_local=False)
    known_ns = time.perf_counter_ns()
    ray.wait([reference], fetch_local=True)
    local_ns = time.perf_counter_ns()
    answer: tuple[list[bytes], NDArray[np.uint8] | None] = ray.get(reference)
    seen_ns = time.perf_counter_ns()
    built_ns = int.from_bytes(answer[0][1], "little")
    return _Followed(known_ns - built_ns, local_ns - known_ns, seen_ns - local_ns)
