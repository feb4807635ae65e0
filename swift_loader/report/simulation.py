"""Simulates a loader: workers, cores, delivery and loop, event by event. Pure; the same input gives the same result.

    free worker ─lag─► waits for I/O ─► needs a core ─► built ─transport─► decoded, one at a time ─► ready
    loop: waits for the next batch ─► step: needs no core, then needs one ─► asks for the next

The trainer and the workers share the cores equally. No more batches are in flight than the limit allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from swift_loader.report.cores import Cores
from swift_loader.report.workload import Workload
from swift_loader.sampling.permutation import derive_key, permute

__all__ = ["Loader", "Outcome", "simulate"]

_NUM_BATCHES = 800
_SHORTEST_S = 1e-6
"""Of a simulation, so that rates are finite."""

_READY, _STEP_WAITED, _COMPUTE, _IO_DONE, _FREE = range(5)
_LOOP, _ASIDE = -1, -2
"""Jobs on the cores that aren't a worker's."""


@dataclass(frozen=True, slots=True)
class Loader:
    """How a loader is set up."""

    num_workers: int
    """0: batches are built in the loop's thread."""
    max_in_flight: int
    in_order: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated loop got."""

    batches_per_s: float
    wait_share: float
    """Share of the time in which the loop waited, from 0 to 1."""
    num_built: int
    num_delivered: int
    """In all, also while the loader filled up."""


def simulate(workload: Workload, loader: Loader, *, num_batches: int = _NUM_BATCHES, seed: int = 0) -> Outcome:
    """Return the speed of a loop over so many batches. The batches until the loader has filled up don't count."""
    if not loader.num_workers:
        return _inline(workload, _Draws.of(workload, num_batches, seed))
    num_warm = max(1, min(num_batches // 3, 2 * loader.max_in_flight + loader.num_workers))
    # Workers go on until the end, so the last batches cost as much as the others.
    draws = _Draws.of(workload, num_batches + loader.max_in_flight, seed)
    run = _Run(workload, loader, draws, num_warm)
    run.run(num_batches)
    elapsed = max(_SHORTEST_S, run.delivered_at - run.warm_at)
    return Outcome((num_batches - num_warm) / elapsed, run.waited / elapsed, run.num_built, run.num_delivered)


@dataclass(frozen=True, slots=True)
class _Draws:
    """What each simulated batch and step costs. Lists, because the events read them one by one."""

    waiting: list[float]
    cpu: list[float]
    decode: list[float]
    pickup: list[float]
    pickup_ready: list[float]
    step_waiting: list[float]
    step_cpu: list[float]

    @classmethod
    def of(cls, workload: Workload, number: int, seed: int) -> _Draws:
        """Draw without replacement, and again when all are drawn: this keeps the mean of a heavy tail."""
        batches = _draw(len(workload.cpu), number, seed)
        steps = _draw(len(workload.step_cpu), number, seed + 1)
        return cls(
            *(
                values[batches].tolist()
                for values in (workload.waiting, workload.cpu, workload.decode, workload.pickup, workload.pickup_ready)
            ),
            *(values[steps].tolist() for values in (workload.step_waiting, workload.step_cpu)),
        )


def _draw(size: int, number: int, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.intp]]:
    rounds = [
        permute(np.arange(size, dtype=np.uint64), size, np.array([derive_key(seed, turn)], np.uint64))
        for turn in range(-(-number // size))
    ]
    return np.concatenate(rounds)[:number].astype(np.intp)


def _inline(workload: Workload, draws: _Draws) -> Outcome:
    """Return the outcome without workers: one batch after the other."""
    number = len(draws.cpu)
    waited = sum(draws.waiting) + sum(draws.cpu) + sum(draws.pickup) + workload.lag * number
    elapsed = max(_SHORTEST_S, waited + sum(draws.step_waiting) + sum(draws.step_cpu))
    return Outcome(number / elapsed, waited / elapsed, number, number)


class _Run:
    """One simulation while it runs."""

    def __init__(self, workload: Workload, loader: Loader, draws: _Draws, num_warm: int) -> None:
        self._draws = draws
        self._loader = loader
        self._workload = workload
        self._num_warm = num_warm
        self._max_ready = max(2, loader.max_in_flight // loader.num_workers + 1)
        self._cores = Cores(workload.cores, workload.interference, workload.slowdown)
        self._events: list[tuple[float, int, int]] = []
        self._free = list(range(loader.num_workers))
        """Workers without a task."""
        self._doing = [0] * loader.num_workers
        """Which batch each worker is at."""
        self._builder = [0] * len(draws.cpu)
        """Which worker has built each batch."""
        self._num_ready_of = [0] * loader.num_workers
        self._ready: list[int] = []
        """In order: a heap of batch numbers. Otherwise: a queue, its oldest first."""
        self._num_sent = self._next = 0
        self._gil_free_at = 0.0
        """When the thread that decodes has decoded all that it has, or the loop lets go of the GIL."""
        self._asked_at: float | None = 0.0
        """When the loop asked for a batch that it hasn't got; None: it works at a step."""
        self.now = self.warm_at = self.delivered_at = self.waited = 0.0
        self.num_built = self.num_delivered = 0

    def run(self, num_batches: int) -> None:
        """Run until the loop has so many batches."""
        self._send()
        events, cores = self._events, self._cores
        while self.num_delivered < num_batches:
            cpu_at = cores.next_end()
            if events and events[0][0] <= cpu_at:
                self.now, kind, number = heappop(events)
                self._handle(kind, number)
            else:
                self.now = cpu_at
                self._end_cpu(cores.pop(cpu_at))

    def _handle(self, kind: int, number: int) -> None:
        if kind == _READY:
            self._get_ready(number)
        elif kind == _IO_DONE:
            self._cores.add(self.now, number, self._draws.cpu[self._doing[number]])
        elif kind == _STEP_WAITED:
            self._take_gil(number)
        elif kind == _COMPUTE:
            self._cores.add(self.now, _LOOP, self._draws.step_cpu[number])
        else:
            self._free.append(number)
            self._send()

    def _take_gil(self, step: int) -> None:
        """The loop needs a core for the rest of its step, and the GIL, which a thread that decodes may hold.

        Then it waits for a decode at most. The model may compute without the GIL: it isn't known for how long the loop
        holds it, so this is taken to be no longer than a decode.
        """
        decode = self._draws.decode[step]
        begin = min(max(self.now, self._gil_free_at), self.now + decode)
        self._gil_free_at = max(begin, self._gil_free_at) + min(self._draws.step_cpu[step], decode)
        heappush(self._events, (begin, _COMPUTE, step))

    def _end_cpu(self, job: int) -> None:
        if job == _LOOP:
            self._ask()
        elif job >= 0:
            self._end_build(job)

    def _send(self) -> None:
        """Give tasks to free workers, as far as the limits allow."""
        limit = min(len(self._builder), self.num_delivered + self._loader.max_in_flight)
        while self._free and self._num_sent < limit:
            worker = next((one for one in self._free if self._num_ready_of[one] < self._max_ready), None)
            if worker is None:
                return
            self._free.remove(worker)
            batch, self._num_sent = self._num_sent, self._num_sent + 1
            self._doing[worker], self._builder[batch] = batch, worker
            begin = self.now + self._workload.lag + self._draws.waiting[batch]
            heappush(self._events, (begin, _IO_DONE, worker))

    def _end_build(self, worker: int) -> None:
        batch = self._doing[worker]
        self.num_built += 1
        received = self.now + self._workload.transport
        self._gil_free_at = max(self._gil_free_at, received) + self._draws.decode[batch]
        heappush(self._events, (self._gil_free_at, _READY, batch))
        self._num_ready_of[worker] += 1
        if self._workload.aside_cpu:
            self._cores.add(self.now, _ASIDE, self._workload.aside_cpu)
        if self._workload.round_trip:
            heappush(self._events, (received, _FREE, worker))
        else:
            self._free.append(worker)
            self._send()

    def _get_ready(self, batch: int) -> None:
        if self._loader.in_order:
            heappush(self._ready, batch)
        else:
            self._ready.append(batch)
        if self._asked_at is not None:
            self._deliver()

    def _ask(self) -> None:
        """The loop asks for its next batch."""
        self._asked_at = self.now
        self._deliver()

    def _deliver(self) -> None:
        """Give the loop its next batch, if it is there."""
        if not self._ready or (self._loader.in_order and self._ready[0] != self._next):
            return
        batch = heappop(self._ready) if self._loader.in_order else self._ready.pop(0)
        assert self._asked_at is not None, "the loop has asked"
        has_waited = self.now > self._asked_at
        pickup = self._draws.pickup[batch] if has_waited else self._draws.pickup_ready[batch]
        waited, self._asked_at = self.now + pickup - self._asked_at, None
        self.delivered_at = self.now + pickup
        if self._next < self._num_warm:
            self.warm_at = self.delivered_at
        else:
            self.waited += waited
        step, self._next = self._next, self._next + 1
        self.num_delivered += 1
        self._num_ready_of[self._builder[batch]] -= 1
        heappush(self._events, (self.delivered_at + self._draws.step_waiting[step], _STEP_WAITED, step))
        self._send()
