"""The public ways to load, each with 20 numbered batches, so that one test can hold for all of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from swift_loader import DataLoader, SwiftLoader
from swift_loader.pipeline import Pipeline, StageLoader

NUM_BATCHES = 20

GO_ON = "go on"
"""The file in the folder of `Numbers` that ends all waits."""

MIXED = [number * 7 % NUM_BATCHES for number in range(NUM_BATCHES)]
"""What the sampler gives."""


class Numbers:
    """Sample i is `[i, ..., i, pid of its worker] int64`. What happens at some samples is said by `deeds`."""

    def __init__(self, size: int = 8, deeds: Mapping[int, str] | None = None, marker: str = "") -> None:
        """Make `size` numbers of each sample. `marker` is a folder that gets a file for each process that waits."""
        self.size, self.deeds, self.marker = size, dict(deeds or {}), marker

    def __len__(self) -> int:
        return NUM_BATCHES

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        deed = self.deeds.get(index)
        if deed == "raise":
            raise ValueError(f"sample {index} is bad")
        if deed == "die":
            os._exit(3)
        if deed in ("hang", "wait"):
            if deed == "hang":
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            Path(self.marker, str(os.getpid())).touch()
            while not Path(self.marker, GO_ON).exists():
                time.sleep(0.01)
        sample = np.full(self.size, index)
        sample[-1] = os.getpid()
        return sample

    __call__ = __getitem__


class Stream(IterableDataset[Any]):
    """The same samples, shared out over the workers."""

    def __init__(self, **options: Any) -> None:
        self.numbers = Numbers(**options)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.numbers[index] for index in range(first, NUM_BATCHES, step))


class Stateful(Stream):
    """A stream that is at a place of its own. A new iterator goes on there."""

    place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < NUM_BATCHES:
            self.place += 1
            yield self.numbers[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@dataclass(frozen=True)
class Front:
    """One way to load."""

    name: str
    make: Callable[..., Any]
    """Returns a loader. Its arguments are those of `Numbers`, `timeout` and `worker_restarts`."""
    planned: tuple[int, ...] = tuple(range(NUM_BATCHES))
    """The numbers of the batches, in order."""
    has_processes: bool = True
    in_order: bool = True
    works_ahead: bool = True
    """Whether anything but the loop's thread builds batches."""
    iterators: str = "independent"
    """What a second iterator does to the first: "independent", it has an epoch of its own; "superseded", the first one
    ends, as with a load; "the same", the first one begins again; "one place", both move the dataset."""

    @property
    def saves(self) -> bool:
        """Whether it has a state in the middle of an epoch."""
        return self.in_order or self.is_torchs

    @property
    def is_torchs(self) -> bool:
        """Whether it does as torch's loader: `close` isn't the end of it, and it learns of an end only by asking."""
        return self.name.startswith("DataLoader")

    def __str__(self) -> str:
        return self.name


def number_of(batch: Any) -> int:
    """Return a batch's number, if the whole batch has it."""
    numbers = np.asarray(batch).reshape(-1)[:-1]
    assert (numbers == numbers[0]).all(), numbers
    return int(numbers[0])


def pid_of(batch: Any) -> int:
    """Return the process that has built the batch."""
    return int(np.asarray(batch).reshape(-1)[-1])


def swift_loader(num_workers: int = 2, given: Mapping[str, Any] | None = None, **options: Any) -> SwiftLoader:
    fixed = {"shuffle": False, "seed": 0, "validate": False, **limits(options), **(given or {})}
    return SwiftLoader(Numbers, options, worker_per_consumer=num_workers, **fixed)


def limits(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of a loader out of those of `Numbers`."""
    return {"worker_restarts": options.pop("worker_restarts", 0), "timeout": options.pop("timeout", 0)}


def data_loader(given: Mapping[str, Any] | None = None, **options: Any) -> DataLoader[Any]:
    fixed = {"sampler": MIXED, "num_workers": 2, **limits(options), **(given or {})}
    return DataLoader(Numbers(**options), **fixed)  # type: ignore[arg-type]


def stream(num_workers: int = 2, kind: type[Stream] = Stream, **options: Any) -> DataLoader[Any]:
    fixed = limits(options)
    return DataLoader(kind(**options), num_workers=num_workers, **fixed)


def pipeline(on: Any = "process", **options: Any) -> Pipeline:
    timeout = limits(options)["timeout"]
    return Pipeline(range(NUM_BATCHES), seed=0).map(Numbers(**options), concurrency=2, on=on, timeout=timeout)


def stage_loader(**options: Any) -> StageLoader:
    timeout = limits(options)["timeout"]
    return StageLoader(
        range(NUM_BATCHES),
        preprocessor=Numbers(**options),
        batch_size=1,
        aggregator=np.stack,
        num_threads=2,
        output_order="input",
        seed=0,
        timeout=timeout,
    )


def plain_pipeline(**options: Any) -> Pipeline:
    timeout = limits(options)["timeout"]
    return Pipeline(range(NUM_BATCHES), seed=0).map(Numbers(**options), timeout=timeout).batch(1)


OfSwift = partial(Front, iterators="superseded")
INLINE: dict[str, Any] = {"has_processes": False, "works_ahead": False}
TO_DEVICE = {"device": "cpu", "max_nb_batch_on_device": 2}

FRONTS = (
    OfSwift("SwiftLoader", swift_loader),
    Front("DataLoader", data_loader, tuple(MIXED)),
    Front("DataLoader to a device", partial(data_loader, TO_DEVICE), tuple(MIXED)),
    Front("DataLoader of a stream", stream),
    Front("Pipeline in processes", pipeline),
    Front("StageLoader", stage_loader, has_processes=False),
)

INTERRUPTED = (
    *FRONTS,
    OfSwift("SwiftLoader without workers", partial(swift_loader, 0), **INLINE),
    OfSwift("SwiftLoader with threads", partial(swift_loader, 2, {"worker_type": "thread"}), has_processes=False),
    OfSwift("SwiftLoader out of order", partial(swift_loader, 2, {"in_order": False}), in_order=False),
    Front("DataLoader without workers", partial(data_loader, {"num_workers": 0}), tuple(MIXED), **INLINE),
    Front(
        "DataLoader with threads", partial(data_loader, {"worker_type": "thread"}), tuple(MIXED), has_processes=False
    ),
    Front("DataLoader out of order", partial(data_loader, {"in_order": False, "sampler": None}), in_order=False),
    Front(
        "DataLoader with workers that stay",
        partial(data_loader, {"persistent_workers": True}),
        tuple(MIXED),
        iterators="the same",
    ),
    Front("DataLoader of a stream without workers", partial(stream, 0), **INLINE),
    Front(
        "DataLoader of a stateful stream without workers", partial(stream, 0, Stateful), **INLINE, iterators="one place"
    ),
    Front("Pipeline in threads", partial(pipeline, "thread"), has_processes=False),
    Front("Pipeline without workers", plain_pipeline, has_processes=False),
)
"""More of them, each with code of its own for what an interrupt leaves behind."""
