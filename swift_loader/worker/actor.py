"""A worker that is a Ray actor: see `CalledWorker`. Runs on any node, and doesn't import Ray.

The result of a call is one object: Ray puts its memory into the object store of this node. Requests about the thread
that builds are answered on a second one, and a third one waits for the actor's end.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from swift_loader.transport.messages import Identity
from swift_loader.transport.payload import Payload
from swift_loader.worker.build import ThreadUsage
from swift_loader.worker.called import CalledWorker, Reply
from swift_loader.worker.loop import DatasetBuilder
from swift_loader.worker.process import stack_of


class ActorPayload(NamedTuple):
    """What actors build the dataset from. All of them read the same object."""

    payload: Payload
    path: tuple[str, ...]
    """The trainer's import path, as far as the node has it."""
    directory: str | None
    """The trainer's working directory. None: Ray's choice stays."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where an actor runs."""

    pid: int
    host: str
    machine: str
    """As from `machine_id`."""


def machine_id() -> str:
    """Return what tells this boot of this machine from all others: within it, processes have one monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


class BatchActor(CalledWorker):
    """The worker. Ray calls its methods."""

    def __init__(self) -> None:
        super().__init__(ThreadUsage)
        self._end = threading.Event()
        """Never set."""

    # The thread that builds

    def introduce(self) -> Location:
        """Return where it runs. The first call: its answer says that Ray has placed the actor."""
        return Location(os.getpid(), socket.gethostname(), machine_id())

    def start(self, given: ActorPayload, serial: int, identity: Identity | None) -> Reply:
        """Build the dataset, see `begin`."""
        _settle(given)
        # A copy: a dataset may write to its arrays, and other actors read the payload.
        payload = Payload(given.payload.layout, np.array(given.payload.memory))
        return self.begin(DatasetBuilder.of(payload), serial, identity)

    # The thread that answers requests

    def stacks(self) -> str:
        """Return the Python stack of the thread that builds, from the user's code on. Empty if it builds nothing."""
        return stack_of(self._thread_id)

    # The thread that waits

    def await_end(self) -> None:
        """Never return: the call fails when the actor ends."""
        self._end.wait()


def _settle(given: ActorPayload) -> None:
    sys.path.extend(entry for entry in given.path if entry not in sys.path and Path(entry).exists())
    if given.directory is not None and Path(given.directory).is_dir():
        os.chdir(given.directory)
