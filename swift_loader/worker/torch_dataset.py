"""A worker that is the dataset of a DataLoader of torch's, in its only worker process: see `CalledWorker`.

    trainer ──sampler: messages──► torch's worker process ──CalledDataset[messages]──► messages, memory ──► trainer

torch starts the process, and carries what it is asked for and what it gives. `executors.torch_fleet` is the other side.
"""

from __future__ import annotations

import pickle
from multiprocessing import process
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data._utils import worker

from swift_loader.errors import SharedMemoryFull
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.messages import Identity
from swift_loader.transport.payload import Environment, Payload
from swift_loader.worker.build import ProcessUsage
from swift_loader.worker.called import CalledWorker, Reply
from swift_loader.worker.loop import DatasetBuilder
from swift_loader.worker.process import reset_signals
from swift_loader.worker.spec import WorkerSpec

Given = tuple[WorkerSpec, Definitions, Environment]
"""What the user's dataset is built from, for a fork, which has it without being sent it."""


class CalledDataset:
    """Answers one call for each list of messages. The first call builds the user's dataset."""

    def __init__(self, given: Given | None, serial: int, identity: Identity | None) -> None:
        """Build nothing yet. `given` None: the first call brings a payload. `identity`: see `CalledWorker.begin`."""
        self._given = given
        self._serial, self._identity = serial, identity
        self._worker: CalledWorker | None = None

    def __getitem__(self, call: Any) -> bytes:
        """Return the answer, pickled: as in a `Reply`, the messages and the memory, or an error that isn't the user's.

        In the worker process. `call`: messages, first of all a `Payload` or nothing.
        """
        # Pickled here, its memory shared: torch sends an answer in the background, when the next batch may lie in the
        # slot, and where nobody hears of an error.
        try:
            reply = self._begin(call) if self._worker is None else self._worker.build(call)
            memory = None if reply.memory is None else _shared(reply.memory)
            return bytes(ForkingPickler.dumps((reply.messages, memory)))
        except Exception as error:
            try:
                return pickle.dumps(error)
            except Exception:
                return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))

    def _begin(self, payload: Payload | None) -> Reply:
        reset_signals()  # the trainer handles Ctrl-C
        process.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # noqa: SLF001 - a dataset may start processes
        worker._worker_info = None  # noqa: SLF001 - the dataset is no worker's of torch, unless torch mode says so
        given, self._given = self._given, None
        if given is None:
            assert payload is not None, "the first call brings it"
            builder = DatasetBuilder.of(payload)
        else:
            builder = DatasetBuilder(given[:2], given[2])
        self._worker = CalledWorker(ProcessUsage)
        return self._worker.begin(builder, self._serial, self._identity)


def _shared(memory: NDArray[np.uint8]) -> torch.Tensor:
    try:
        shared: torch.Tensor = torch.from_numpy(memory).share_memory_()
    except (RuntimeError, OSError) as error:
        raise SharedMemoryFull(
            f"there is no shared memory for a batch of {memory.nbytes} bytes ({error}). Lower batch_size or "
            f"data_queue_size (DataLoader: prefetch_factor), keep fewer batches, or give the system more"
        ) from None
    return shared


def as_it_is(answer: Any) -> Any:
    """Return what the dataset gave, in the place of torch's collate function."""
    return answer
