"""`mapped` reads samples apart from transforming them: what, how many at a time, when, and what becomes of failures."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from swift_loader import DataLoader, Mixture, SamplesDraw, SwiftLoader, WorkerStalled, cached, mapped, sample_rng
from swift_loader.pipeline import Pipeline
from tests.support.helpers import run_script, slow

NUM = 48


class Numbers:
    """Sample i is `[i, i]`. `deed(indices)` is called before it is read."""

    def __init__(self, deed: Callable[[Sequence[int]], Any] = len) -> None:
        self.deed = deed

    def __len__(self) -> int:
        return NUM

    def _read(self, indices: Sequence[int]) -> list[Any]:
        self.deed(indices)
        return [np.full(2, float(index)) for index in indices]


class Single(Numbers):
    def __getitem__(self, index: int) -> Any:
        return self._read([index])[0]


class Bulk(Single):
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return self._read(indices)


class Fetching(Numbers):
    def fetch(self, indices: Sequence[int]) -> list[Any]:
        return self._read(indices)


class Awaiting(Numbers):
    async def fetch(self, indices: Sequence[int]) -> list[Any]:
        await asyncio.sleep(0)
        return self._read(indices)


KINDS = (Single, Bulk, Fetching, Awaiting)
kinds = pytest.mark.parametrize("kind", KINDS)


def jitter(sample: Any) -> Any:
    sample += np.random.rand()  # in place
    return sample + random.random() + torch.rand(()).item() + sample_rng().random()


def batches(dataset: Any, num_workers: int, **options: Any) -> list[Any]:
    with SwiftLoader(
        dataset=dataset, nb_consumer=1, worker_per_consumer=num_workers, batch_size=8, seed=3, **options
    ) as loader:
        return [np.array(batch) for batch in loader]


@pytest.fixture(scope="module")
def expected() -> Any:
    class Plain(Single):
        def __getitem__(self, index: int) -> Any:
            return jitter(super().__getitem__(index))

    return np.concatenate(batches(Plain(), 1))


@kinds
@pytest.mark.parametrize(
    ("num_workers", "reads"), [(0, None), (0, 5), (2, 3), slow(1, None), slow(3, 64), slow(2, "auto")]
)
def test_batches_are_those_of_a_dataset_that_reads_and_transforms(
    kind: Any, num_workers: int, reads: Any, expected: Any
) -> None:
    assert np.array_equal(np.concatenate(batches(mapped(kind(), jitter, reads=reads), num_workers)), expected)


@pytest.mark.parametrize("num_workers", [0, slow(2)])
def test_mapped_datasets_are_found_inside_others(num_workers: int, expected: Any) -> None:
    def made(reads: int | None) -> list[Any]:
        single, awaiting = mapped(Single(), jitter, reads=reads), mapped(Awaiting(), jitter, reads=reads)
        return [
            Mixture({"one": single, "two": awaiting, "three": Single()}),
            Subset(cast(Any, single), range(5, 40)),
            ConcatDataset(cast(Any, [single, awaiting, Single()])),
            mapped(cached(Single()), jitter, reads=reads),
        ]

    for many, one in zip(made(4), made(None), strict=True):
        found = np.concatenate(batches(many, num_workers))
        assert np.array_equal(found, np.concatenate(batches(one, 0)))
    assert np.array_equal(found, expected)  # from the cache


@kinds
@pytest.mark.parametrize("make", [DataLoader, torch.utils.data.DataLoader])
@pytest.mark.parametrize("num_workers", [0, slow(2)])
def test_dataloaders_get_each_sample_once(kind: Any, make: Any, num_workers: int) -> None:
    dataset: Any = mapped(kind(), np.negative, reads=4)
    loader = make(dataset, batch_size=7, num_workers=num_workers)

    assert torch.cat([*loader])[:, 0].tolist() == [-float(number) for number in range(NUM)]
    assert [*dataset[3]] == [-3, -3]


class Together:
    """A deed that waits until so many calls are under way, and notes how many were at most."""

    def __init__(self, number: int) -> None:
        self.barrier, self.number, self.most, self.lock = threading.Barrier(number), 0, 0, threading.Lock()

    def __call__(self, indices: Sequence[int]) -> None:
        with self.lock:
            self.number += 1
            self.most = max(self.most, self.number)
        self.barrier.wait(20)
        with self.lock:
            self.number -= 1


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("reads", [None, 4])
def test_so_many_reads_run_at_a_time(kind: Any, reads: int | None) -> None:
    deed = Together(reads or 1)

    assert len(batches(mapped(kind(deed), reads=reads), 0)) == NUM // 8
    assert deed.most == (reads or 1)


class Next:
    """Transforms the first sample once a sample of the next batch is being read, which is noted here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, given: Any) -> Any:
        if isinstance(given, list):
            (self.folder / str(int(given[0]) // 8)).touch()
        elif not given[0]:
            end_s = time.monotonic() + 20
            while not (self.folder / "1").exists():
                assert time.monotonic() < end_s, "it reads ahead"
                time.sleep(0.001)
        return given


@pytest.mark.parametrize("kind", [Single, Bulk])
@pytest.mark.parametrize("options", [{}, {"worker_type": "thread"}])
def test_a_worker_reads_for_its_next_task_while_it_transforms(kind: Any, options: Any, tmp_path: Path) -> None:
    dataset: Any = mapped(kind(Next(tmp_path)), Next(tmp_path), reads=2)
    loader: Any = DataLoader(
        dataset, batch_sampler=[[*range(40, 48)], [*range(8)], [*range(8, 16)]], num_workers=1, **options
    )

    assert len([*loader]) == 3


DRAWS = (
    lambda: random.random(),  # noqa: PLW0108 - the method would be pickled with its generator
    lambda: np.random.rand(),  # noqa: PLW0108
    lambda: torch.rand(()),
    lambda: sample_rng().random(),
)


@kinds
@pytest.mark.parametrize("draw", DRAWS)
def test_a_dataset_that_draws_is_told_to_leave_that_to_the_transform(kind: Any, draw: Any) -> None:
    message = r"Move what is random to mapped\(transform="
    with pytest.raises(SamplesDraw, match=message):
        batches(mapped(kind(lambda _: draw())), 1, on_error="skip", validate=False)
    with pytest.raises(SamplesDraw, match=message):
        list(DataLoader(cast(Any, mapped(kind(lambda _: draw()))), batch_size=4, num_workers=1))


class Failing:
    """A deed that fails for some indices: `times` by index."""

    def __init__(self, **times: int) -> None:
        self.times = {int(name[1:]): number for name, number in times.items()}

    def __call__(self, indices: Sequence[int]) -> None:
        for index in indices:
            if self.times.get(index, 0) > 0:
                self.times[index] -= 1
                raise OSError(f"no answer for {index}")


@kinds
@pytest.mark.parametrize("num_workers", [0, slow(2)])
def test_a_read_is_repeated_and_then_fails_as_its_sample_alone(kind: Any, num_workers: int) -> None:
    def made(**times: int) -> Any:
        return mapped(kind(Failing(**times)), reads=2, retries=2)

    assert len(np.concatenate(batches(made(i3=1, i17=2), num_workers))) == NUM
    with pytest.raises(OSError, match="no answer for 17") as caught:
        batches(made(i17=99), num_workers)
    if hasattr(caught.value, "__notes__"):
        assert "attempts to read index 17: OSError: no answer for 17; OSError" in "".join(caught.value.__notes__)
    with pytest.warns(UserWarning, match="1 of 48 samples failed and were left out"):
        rest = np.concatenate(batches(made(i17=99), num_workers, on_error="skip"))
    assert sorted(rest[:, 0]) == [index for index in range(NUM) if index != 17]
    with pytest.warns(UserWarning, match="1 of 48 samples failed and were replaced"):
        assert len(np.concatenate(batches(made(i17=99), num_workers, on_error="replace"))) == NUM


def hang(indices: Sequence[int]) -> None:
    if 17 in indices:
        time.sleep(1000)


class Stuck(Numbers):
    async def fetch(self, indices: Sequence[int]) -> list[Any]:
        if 17 in indices:
            await asyncio.sleep(1000)
        return self._read(indices)


@pytest.mark.slow
@pytest.mark.parametrize(("dataset", "frame"), [(Single(hang), "in hang"), (Stuck(), "in fetch")])
def test_a_read_that_hangs_is_named_with_its_stack_or_left_out(dataset: Any, frame: str) -> None:
    with pytest.raises(WorkerStalled, match="dataset index 17") as caught:
        batches(mapped(dataset, reads=8), 1, timeout=2, worker_restarts=0)
    assert frame in str(caught.value)
    with pytest.warns(UserWarning, match="left out"):
        rest = np.concatenate(batches(mapped(dataset, reads=8), 1, timeout=2, on_error="skip"))
    assert sorted(rest[:, 0]) == [index for index in range(NUM) if index != 17]


CLOSES = """
import asyncio, threading, time
from swift_loader import LoaderClosed, SwiftLoader, mapped

class Hangs:
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        time.sleep(1000)

class Awaits(Hangs):
    async def fetch(self, indices):
        await asyncio.sleep(1000)

def take(loader, errors):
    try:
        next(iter(loader))
    except LoaderClosed as error:
        errors.append(error)

for dataset in (Hangs(), Awaits()):
    for options in ({"worker_per_consumer": 0}, {}, {"worker_type": "thread"}):
        options = {"worker_per_consumer": 2, "nb_consumer": 1, "batch_size": 64, "validate": False, **options}
        loader, errors = SwiftLoader(dataset=mapped(dataset, reads=64), **options), []
        thread = threading.Thread(target=take, args=(loader, errors))
        thread.start()
        time.sleep(0.5)
        began_s = time.monotonic()
        loader.close()
        assert time.monotonic() - began_s < 5, options
        thread.join(5)
        assert len(errors) == 1, options
"""


@pytest.mark.slow
def test_a_loader_with_many_reads_that_hang_closes(tmp_path: Path) -> None:
    run_script(CLOSES, folder=tmp_path)


def test_wrong_arguments_are_refused() -> None:
    for wrong in ({"reads": 0}, {"reads": 1.5}, {"reads": "many"}, {"retries": -1}, {"transform": 3}):
        with pytest.raises((TypeError, ValueError)):
            mapped(Single(), **wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="only its sources"):
        mapped(Mixture({"one": Single()}))
    with pytest.raises(TypeError, match="map-style"):
        mapped(3)


class Wrong(Bulk):
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return super().__getitems__(indices)[1:]


def test_a_dataset_must_return_one_sample_per_index() -> None:
    with pytest.raises(ValueError, match="read 7 samples, and not 8; return one for each index"):
        batches(mapped(Wrong(), retries=0), 0)


def test_the_report_says_how_long_reads_were_waited_for() -> None:
    with SwiftLoader(
        dataset=mapped(Single(lambda _: time.sleep(0.02)), reads=2),
        worker_per_consumer=2,
        batch_size=2,
        nb_consumer=1,
        data_queue_size=4,
    ) as loader:
        assert len([*loader]) == NUM // 2
        report = loader.report()

    parts = {part.name: part for part in report.breakdown.parts}
    assert parts["read"].share > parts["fetch"].share
    assert 0 < report.breakdown.reads < 2.5
    assert "times at once" in repr(report)
    assert loader.metrics()["swift_loader/read_ms_p50"] > 0


def flaky(deed: Failing) -> Sequence[Callable[[int], Any]]:
    def plain(index: int) -> int:
        deed([index])
        return index

    async def awaited(index: int) -> int:
        return plain(index)

    return plain, awaited


def test_a_pipeline_s_stage_repeats_its_calls_and_reads_a_mapped_source_ahead() -> None:
    for number in range(2):
        function = flaky(Failing(i3=2, i5=1))[number]
        with pytest.raises(OSError, match="no answer for 3"):
            list(Pipeline(range(8)).map(function, concurrency=2, retries=1))
        assert list(Pipeline(range(8)).map(function, concurrency=2, retries=1)) == [*range(8)]
    with pytest.raises(ValueError, match="can't repeat a generator"):
        Pipeline(range(8)).map(lambda item: (yield item), retries=1)
    deed = Together(4)
    assert [item[0] for item in Pipeline(mapped(Single(deed), reads=4))] == [*range(NUM)]
    assert deed.most == 4
