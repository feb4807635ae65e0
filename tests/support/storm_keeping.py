"""Batches that are kept, by the loop or by a fork of the trainer: they must stay what they were."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
from random import Random
from typing import Any, NoReturn

import numpy as np

from tests.support.storm_trainer import kill

_CHILD_LIMIT_S = 5
"""For a child's `next`: then it counts as hanging."""


def _checksum(part: Any) -> int:
    """Return what two parts of batches have in common if their bytes are equal."""
    if isinstance(part, dict):
        return hash(tuple((name, _checksum(value)) for name, value in sorted(part.items())))
    if isinstance(part, list):
        return hash(tuple(map(_checksum, part)))
    return hash(np.ascontiguousarray(part).tobytes())


class Kept:
    """A part of a batch, and what it was when it came."""

    def __init__(self, name: str, batch: Any, rng: Random) -> None:
        self.name = name
        self._part = _part_of(batch, rng)
        self._checksum = _checksum(self._part)

    @property
    def is_changed(self) -> bool:
        """Whether it isn't any more what it was."""
        return _checksum(self._part) != self._checksum


def _part_of(batch: Any, rng: Random) -> Any:
    part = batch
    while rng.random() < 0.5:
        if isinstance(part, dict):
            part = part["data"]
        elif (isinstance(part, list) or (isinstance(part, np.ndarray) and part.ndim)) and len(part):
            begin = rng.randrange(len(part))
            is_row = rng.random() < 0.5 and getattr(part, "ndim", 2) > 1  # a scalar would be a copy
            part = part[begin] if is_row else part[begin:]
        else:
            break
    return part


class Holder:
    """A fork of the trainer that keeps batches, and tells in the end whether they are what they were."""

    def __init__(self, kept: list[Kept], iterator: Any, rng: Random) -> None:
        """Fork; with an iterator, the child asks that for a batch."""
        go, self._go = os.pipe()
        self._report, report = os.pipe()
        drops = [number for number in range(len(kept)) if rng.random() < 0.3]
        self.pid = os.fork()
        if self.pid == 0:
            _keep_and_report(kept, drops, iterator, go, report)
        os.close(go)
        os.close(report)

    def finish(self) -> str:
        """Have the child look at its batches and end; return what is wrong, if anything is."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._go, b"!")
        poll = select.poll()
        poll.register(self._report, select.POLLIN)
        told = os.read(self._report, 4096).decode() if poll.poll(2000 * _CHILD_LIMIT_S) else ""
        os.close(self._go)
        os.close(self._report)
        if not told:
            kill(self.pid)
        with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored: the kernel reaps
            os.waitpid(self.pid, 0)
        if not told:
            return "a forked child that asked the parent's iterator for a batch hung, or crashed"
        return "" if told == "fine" else told


def _keep_and_report(kept: list[Kept], drops: list[int], iterator: Any, go: int, report: int) -> NoReturn:
    told = "the child failed"
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_CHILD_LIMIT_S if iterator is not None else 0)
        with contextlib.suppress(Exception):
            if iterator is not None:
                next(iterator)
        signal.alarm(0)
        for number in reversed(drops):
            del kept[number]
        gc.collect()
        os.read(go, 1)
        changed = [one.name for one in kept if one.is_changed]
        told = f"in a forked child, kept batches changed: {', '.join(changed[:5])}" if changed else "fine"
    except BaseException as error:
        told = f"a forked child that keeps batches failed: {error!r}"
    finally:
        os.write(report, told.encode())
        os._exit(0)
