"""What users write, for mypy and pyright. Nothing runs this file.

A line with `type: ignore` is a mistake that both must report: mypy with this code, pyright with any. Both report a
comment that isn't needed, too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset
from typing_extensions import assert_type

from swift_loader import (
    DataLoader,
    DevicePrefetcher,
    LengthBucketBatchSampler,
    RayExecutor,
    SampleFailure,
    SharedList,
    ShuffleBatchSampler,
    ShuffleSampler,
    StratifiedBatchSampler,
    SwiftLoader,
    TokenBudgetBatchSampler,
    WeightedBatchSampler,
    distributed,
)
from swift_loader.pipeline import ItemFailure, Pipeline, StageLoader
from swift_loader.report.report import Report
from swift_loader.vision import PrefetchLoader, create_loader

Sample = dict[str, NDArray[np.float32]]


class Images(Dataset[Sample]):
    def __init__(self, root: str = "") -> None:
        self.root = root

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Sample:
        return {"image": np.zeros(3, np.float32)}


def read(path: str) -> bytes:
    return path.encode()


async def fetch(url: str) -> bytes:
    return url.encode()


def lines_of(content: bytes) -> Iterator[str]:
    yield from content.decode().split()


async def lines_later(content: bytes) -> AsyncIterator[str]:
    for line in lines_of(content):
        yield line


def number_or_none(line: str) -> float | None:
    return float(line) if line else None


def swift_loader_is_used(options: dict[str, Any]) -> None:
    with SwiftLoader(Images, {"root": "data"}, batch_size=32, nb_consumer=2, worker_per_consumer=4) as loader:
        loader.start(0, device="cuda", dtype=torch.bfloat16)
        for batch in loader:
            assert_type(batch, Any)
        assert_type(len(loader), int)
        assert_type(loader.state_dict(), dict[str, Any])
        loader.load_state_dict(loader.state_dict())
        assert_type(loader.metrics(), dict[str, float])
        assert_type(loader.failures, list[SampleFailure])
        assert_type(loader.batch_indices, NDArray[np.int64])
        assert_type(str(loader.report().verdict), str)
    SwiftLoader(dataset=Images(), worker_per_consumer="auto", uneven="exact", rng=None, on_error="skip", max_errors=0.1)
    SwiftLoader(Images, worker_type="thread", collate_fn=lambda samples: samples[0])
    SwiftLoader(Images, executor=RayExecutor(num_workers=8), start_method="spawn")
    SwiftLoader(Images, **options)
    SwiftLoader(Images, worker_per_consumers=2)  # type: ignore[arg-type]
    SwiftLoader(Images, worker_per_consumer="all")  # type: ignore[arg-type]
    SwiftLoader(Images, uneven="padding")  # type: ignore[arg-type]
    SwiftLoader(Images, start_method="forkserver")  # type: ignore[arg-type]
    loader.batch_size = 64  # type: ignore[misc]


def shared_lists_are_used(root: str) -> None:
    paths = SharedList(f"{root}/{number}" for number in range(3))
    assert_type(paths[0], str)
    assert_type(paths[1:], list[str])
    paths[0] = root  # type: ignore[index]
    SwiftLoader(dataset=paths, shared=True, batch_size=2)


def data_loader_is_used(state: dict[str, Any]) -> None:
    loader = DataLoader(Images(), batch_size=4, shuffle=True, num_workers="auto", persistent_workers=True)
    loader.load_state_dict(state)
    for batch in loader:
        assert_type(batch, Any)
    assert_type(loader.state_dict(), dict[str, Any])
    torch_loader: torch.utils.data.DataLoader[Sample] = DataLoader(Images(), sampler=ShuffleSampler(Images(), 4))
    assert_type(torch_loader.dataset, Dataset[Sample])
    DataLoader(Images(), batch_sampler=LengthBucketBatchSampler([3, 1], 2, uneven="drop"))
    DataLoader(Images(), batch_sampler=TokenBudgetBatchSampler([3, 1], 8, oversized="alone"))
    DataLoader(Images(), batch_sampler=distributed(ShuffleBatchSampler(Images(), 4, num_replicas=1, rank=0)))
    DataLoader(Images(), batch_sampler=StratifiedBatchSampler(["cat", "dog"], 2, uneven="exact"))
    DataLoader(Images(), batch_sampler=WeightedBatchSampler([3, 0.5], 2, num_samples=8))
    DataLoader(Images(), rng=None, shard_stream="workers", worker_init_fn=print, generator=torch.Generator())
    for moved in DevicePrefetcher(loader, "cuda"):
        assert_type(moved, Any)
    DataLoader(Images(), num_worker=2)  # type: ignore[call-arg]
    DataLoader(Images(), worker_type="threads")  # type: ignore[arg-type]
    TokenBudgetBatchSampler([3, 1], 8, padded=False, fit="best")
    TokenBudgetBatchSampler([3, 1], 8, fit="first")  # type: ignore[arg-type]
    TokenBudgetBatchSampler([3, 1], 8, oversized="skip")  # type: ignore[arg-type]


def pipeline_is_used(pool: ThreadPoolExecutor) -> None:
    urls = Pipeline(["a", "b"], seed=0)
    assert_type(urls, Pipeline[str])
    assert_type(Pipeline(Images()), Pipeline[Sample])
    assert_type(Pipeline(lines_later(b"")), Pipeline[str])
    assert_type(urls.map(read, concurrency=4, on="process"), Pipeline[bytes])
    assert_type(urls.map(read, executor=pool, output_order="completion"), Pipeline[bytes])
    assert_type(urls.map({"a": 1}), Pipeline[int])
    assert_type(urls.map(lambda url: len(url) + 1), Pipeline[int])
    contents = urls.shuffle(8).map(fetch, concurrency=16, on_error="skip", max_errors=3, timeout=5.0)
    assert_type(contents, Pipeline[bytes])
    assert_type(contents.map(lines_later), Pipeline[str])
    numbers = contents.map(lines_of).filter(str.isdigit).map(number_or_none)
    assert_type(numbers, Pipeline[float | None])
    batches = numbers.drop_none().shard(0, 2).batch(4).cache(2)
    assert_type(batches, Pipeline[list[float]])
    assert_type(batches.unbatch(), Pipeline[float])
    assert_type(batches.map(np.array), Pipeline[NDArray[Any]])
    assert_type(urls.merge(contents), Pipeline[str | bytes])
    assert_type(Pipeline.mix([urls, urls], [1.0, 2.0]), Pipeline[str])
    assert_type(Pipeline.mix({"a": urls, "b": urls}, {0: {"a": 1, "b": 2}}, on_end="stop"), Pipeline[str])
    with batches.prefetch(2) as pipe:
        for batch in pipe:
            assert_type(batch, list[float])
        assert_type(pipe.state_dict(), dict[str, Any])
        assert_type(pipe.report(), Report)
        assert_type(pipe.failures, list[ItemFailure])
    for anything in StageLoader(["a"], preprocessor=fetch, batch_size=2, aggregator=b"".join, output_order="input"):
        assert_type(anything, Any)
    contents.map(number_or_none)  # type: ignore[arg-type]
    urls.map(read, on="processes")  # type: ignore[call-overload]
    urls.map(read, concurrent=3)  # type: ignore[call-overload]
    contents.batch(4).map(len).filter(str.isdigit)  # type: ignore[arg-type]
    Pipeline(5)  # type: ignore[arg-type]


def images_are_used(dataset: Any) -> None:
    loader = create_loader(dataset, (3, 224, 224), 32, is_training=True, re_prob=0.25, re_mode="pixel", seed=0)
    for batch in loader:
        assert_type(batch, Any)
    PrefetchLoader(SwiftLoader(Images), channels_last=True)
    create_loader(dataset, 224, 32, on_error="replace")  # type: ignore[arg-type]
    PrefetchLoader(SwiftLoader(Images), re_mode="pixels")  # type: ignore[arg-type]
