"""A worker that is the dataset of a DataLoader of torch's, in its only worker process: see `CalledWorker`.

    trainer ──sampler: messages──► torch's worker process ──CalledDataset[messages]──► messages, memory ──► trainer

torch starts the process, and carries what it is asked for and what it gives. `executors.torch_fleet` is the other side.
"""

from __future__ import annotations

from typing import Any

import torch

from swift_loader.transport.by_value import Definitions
from swift_loader.transport.messages import Identity
from swift_loader.transport.payload import Environment, Payload
from swift_loader.worker.build import ProcessUsage
from swift_loader.worker.called import CalledWorker
from swift_loader.worker.loop import DatasetBuilder
from swift_loader.worker.process import reset_signals
from swift_loader.worker.spec import WorkerSpec

Given = Payload | tuple[WorkerSpec, Definitions, Environment]
"""What the user's dataset is built from: bytes, or what is in them, for a fork."""


class CalledDataset:
    """Answers one call for each list of messages. The first call builds the user's dataset, and its list is empty."""

    def __init__(self, given: Given, serial: int, identity: Identity | None) -> None:
        """Build nothing yet. `identity`: see `CalledWorker.begin`."""
        self._given: Given | None = given
        self._serial, self._identity = serial, identity
        self._worker: CalledWorker | None = None

    def __getitem__(self, messages: list[bytes]) -> tuple[list[bytes], torch.Tensor | None]:
        """Return the answer as a `Reply`, in shared memory that nothing writes to any more. In the worker process."""
        if self._worker is None:
            reset_signals()  # the trainer handles Ctrl-C
            given, self._given = self._given, None
            assert given is not None, "it was begun once"
            builder = DatasetBuilder.of(given) if isinstance(given, Payload) else DatasetBuilder(given[:2], given[2])
            self._worker = CalledWorker(ProcessUsage)
            reply = self._worker.begin(builder, self._serial, self._identity)
        else:
            reply = self._worker.build(messages)
        # Shared here: torch sends an answer in the background, when the next batch may lie in the slot.
        return reply.messages, None if reply.memory is None else torch.from_numpy(reply.memory).share_memory_()


def as_it_is(answer: Any) -> Any:
    """Return what the dataset gave, in the place of torch's collate function."""
    return answer
