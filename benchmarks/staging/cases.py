"""The cases, each as a function that returns an iterator of one system."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from common.datasets import JpegPhotos

from swift_loader.pipeline import Pipeline, StageLoader

NUM_THREADS = 8
NUM_PROCESSES = 2
NBYTES = 10_000_000
SEGMENT_NBYTES = 12_000_000

System = Callable[[int], Iterator[Any]]
"""Returns results for so many items."""


@dataclass(frozen=True, slots=True)
class StageCase:
    """One workload, on several systems."""

    name: str
    title: str
    num_items: int
    """Of one measurement."""
    systems: dict[str, System]
    """swift_loader's first."""


def plus_one(number: int) -> int:
    return number + 1


async def async_plus_one(number: int) -> int:
    return number + 1


def array_of(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return an array of 10 MB."""
    return np.full(NBYTES, number % 256, np.uint8)


class Arrays:
    """The same arrays, as an iterable."""

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items

    def __iter__(self) -> Iterator[Any]:
        return (array_of(number) for number in range(self.num_items))


class Photos:
    """Decodes JPEG photos with Pillow."""

    def __init__(self) -> None:
        self._photos: JpegPhotos | None = None

    def __call__(self, number: int) -> Any:
        """Return a photo."""
        if self._photos is None:
            self._photos = JpegPhotos(64)
        return self._photos[number % 64]


def stage_loader(function: Callable[[int], Any], **options: Any) -> System:
    return lambda num_items: iter(
        StageLoader(range(num_items), preprocessor=function, num_threads=NUM_THREADS, **options)
    )


def spdl_loader(function: Callable[[int], Any], **options: Any) -> System:
    def run(num_items: int) -> Iterator[Any]:
        from spdl.dataloader import DataLoader

        return iter(DataLoader(range(num_items), preprocessor=function, num_threads=NUM_THREADS, **options))

    return run


def processes(num_processes: int) -> System:
    def run(num_items: int) -> Iterator[Any]:
        mapped = Pipeline(range(num_items)).map(
            array_of, concurrency=num_processes, on="process", output_order="completion"
        )
        return iter(mapped.prefetch(3))

    return run


def spdl_pool(num_items: int) -> Iterator[Any]:
    from spdl.pipeline import PipelineBuilder

    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        builder = PipelineBuilder().add_source(range(num_items)).pipe(array_of, executor=pool, concurrency=2)
        pipeline = builder.add_sink(3).build(num_threads=4)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()


def spdl_segments(num_items: int) -> Iterator[Any]:
    from functools import partial

    from spdl.pipeline import PipelineBuilder, SharedMemorySegmentPool, iterate_in_subprocess

    arena = SharedMemorySegmentPool(segment_size=SEGMENT_NBYTES, count=6)
    source = iterate_in_subprocess(partial(Arrays, num_items), arena=arena, buffer_size=3)
    pipeline = PipelineBuilder().add_source(source).add_sink(3).build(num_threads=1)
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()


_PHOTOS = Photos()

CASES = (
    StageCase(
        "small",
        "a function of a few microseconds, in 8 threads",
        20_000,
        {"swift_loader": stage_loader(plus_one), "spdl": spdl_loader(plus_one)},
    ),
    StageCase(
        "small, in order",
        "the same, in the order of the source",
        20_000,
        {
            "swift_loader": stage_loader(plus_one, output_order="input"),
            "spdl": spdl_loader(plus_one, output_order="input"),
        },
    ),
    StageCase(
        "coroutine",
        "a coroutine function that returns at once",
        20_000,
        {"swift_loader": stage_loader(async_plus_one), "spdl": spdl_loader(async_plus_one)},
    ),
    StageCase(
        "jpeg",
        "JPEG photos decoded with Pillow, in 8 threads",
        600,
        {"swift_loader": stage_loader(_PHOTOS), "spdl": spdl_loader(_PHOTOS)},
    ),
    StageCase(
        "arrays",
        "arrays of 10 MB made in 2 processes",
        150,
        {"swift_loader": processes(NUM_PROCESSES), "spdl": spdl_pool},
    ),
    StageCase(
        "arrays, segments",
        "the same in one process; SPDL with its pool of shared-memory segments",
        300,
        {"swift_loader": processes(1), "spdl": spdl_segments},
    ),
)
