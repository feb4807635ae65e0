"""The ideal: two processes that build batches and send nothing.

Each process fetches and collates like a worker of swift_loader, into its own buffer, which is warm and reused. The
processes share the dataset, as swift_loader's workers do: with a copy each, float32 images are about 10 % slower. No
loader with the same dataset and collate can be faster for long.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from common.turns import NUM_DISCARDED

from swift_loader import default_collate
from swift_loader.transport.arena import Arena
from transport.cases import NUM_WORKERS, Case

_STOP_TIMEOUT_S = 10.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class IdealSystem:
    """Processes that start once and build batches for a given time, on request."""

    def __init__(self, case: Case) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(NUM_WORKERS)]
        theirs = [their_end for _, their_end in pipes]
        self._connections = [our_end for our_end, _ in pipes]
        self._process = context.Process(target=_serve_all, args=(theirs, case))
        with _single_threaded_children():
            self._process.start()
        for connection in theirs:
            connection.close()
        for connection in self._connections:
            connection.recv()

    def measure(self, seconds: float) -> float:
        """Return batches per second, over all processes."""
        for connection in self._connections:
            connection.send(seconds)
        return sum(connection.recv() for connection in self._connections)

    def close(self) -> None:
        """Stop the processes."""
        for connection in self._connections:
            connection.close()
        self._process.join(_STOP_TIMEOUT_S)


def _serve_all(connections: list[Connection], case: Case) -> None:
    """Run as the first process, and fork the others. They share the dataset, and so the CPU's cache."""
    dataset = case.make_dataset()
    others = []
    for worker, connection in enumerate(connections[1:], start=1):
        pid = os.fork()
        if pid == 0:
            _serve(connection, dataset, case.batch_size, worker)
            os._exit(0)
        others.append(pid)
        connection.close()
    _serve(connections[0], dataset, case.batch_size, 0)
    for pid in others:
        os.waitpid(pid, 0)


def _serve(connection: Connection, dataset: Any, batch_size: int, worker: int) -> None:
    """Build batches until the other side closes the connection. A request is a number of seconds, the answer a rate."""
    order = np.random.default_rng(1).permutation(len(dataset)).tolist()
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    endless = itertools.cycle(batches[worker::NUM_WORKERS])
    buffer = _touched_buffer(dataset, batches[0])
    connection.send("ready")
    while True:
        try:
            seconds = connection.recv()
        except EOFError:
            return
        connection.send(_run(dataset, endless, buffer, seconds))


def _run(dataset: Any, batches: Iterator[list[int]], buffer: np.ndarray, seconds: float) -> float:
    for _ in range(NUM_DISCARDED // NUM_WORKERS):
        _build(dataset, next(batches), buffer)
    count = 0
    start = now = time.perf_counter()
    while now - start < seconds:
        _build(dataset, next(batches), buffer)
        count += 1
        now = time.perf_counter()
    return count / (now - start)


def _build(dataset: Any, indices: list[int], buffer: np.ndarray) -> int:
    """Build a batch in the buffer, over the previous one. Return its size in bytes."""
    arena = Arena(buffer)
    default_collate([dataset[index] for index in indices], arena)
    return arena.used


def _touched_buffer(dataset: Any, indices: list[int]) -> np.ndarray:
    """Return memory for a batch, with all pages touched."""
    nbytes = _build(dataset, indices, np.empty(0, np.uint8))
    return np.full(nbytes, 1, np.uint8)


@contextmanager
def _single_threaded_children() -> Iterator[None]:
    """Limit numeric libraries to one thread in processes that start in this context, as both loaders do in workers."""
    before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
