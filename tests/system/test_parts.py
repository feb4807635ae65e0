"""Batches that several workers build together have the same bytes as those that one builds, whatever happens."""

from __future__ import annotations

import gc
import itertools
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader import DataLoader, SwiftLoader, WorkerDied
from swift_loader.batch.collate import collate_to_send
from swift_loader.executors.process import memory
from swift_loader.sampling.plan import PlanSettings, Uneven
from swift_loader.sampling.shuffle import OrderSettings
from swift_loader.scheduler import ledger, queues
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.codec import decode
from swift_loader.transport.failpoints import VARIABLE, Failpoint
from swift_loader.transport.messages import Batch, Rows
from swift_loader.transport.slots import HeapStore
from swift_loader.transport.task import Task
from swift_loader.worker.build import BatchBuilder
from swift_loader.worker.failure import BuildError
from swift_loader.worker.seeding import preserved_generators
from swift_loader.worker.spec import WorkerSpec
from tests.support import datasets
from tests.support.helpers import make_loader, set_environ
from tests.support.torch_samples import batches_of_samples, described

# Without processes: any samples, cut anywhere -------------------------------------------------------------------------


class Given:
    """Has these samples, each with what it draws."""

    def __init__(self, samples: Sequence[Any], *, draws: bool) -> None:
        self.samples, self.draws = samples, draws

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        drawn = (random.random(), np.random.rand(2), torch.rand(3)) if self.draws else ()
        return self.samples[index], *drawn


def builder_of(dataset: Given, collate_fn: Any) -> BatchBuilder:
    size = len(dataset)
    order = OrderSettings(1, shuffle=False, window=0, run_length=1)
    plan = PlanSettings(order, size, 1, 0, Uneven.PAD, drop_last=False)
    options = SwiftLoader(dataset=dataset, collate_fn=collate_fn)._options.workers
    return BatchBuilder(dataset, size, WorkerSpec(options, plan), Definitions())


def arrived(batch: Batch, memory: Any) -> Any:
    return described(decode(memoryview(batch.meta), batch.num_blocks, memory, Definitions()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("collate_fn", [None, collate_to_send], ids=["SwiftLoader", "DataLoader"])
@given(
    samples=batches_of_samples().filter(lambda samples: len(samples) > 1),
    cuts=st.sets(st.integers(1, 39), max_size=4),
    draws=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_parts_that_fit_together_are_the_batch(
    collate_fn: Any, samples: list[Any], cuts: set[int], draws: bool
) -> None:
    dataset, store, file = Given(samples, draws=draws), HeapStore(), os.memfd_create("parts")
    bounds = [0, *sorted({cut % len(samples) for cut in cuts} - {0}), len(samples)]
    try:
        with preserved_generators():
            built: list[Batch] = []
            fits = True
            for begin, end in sorted(itertools.pairwise(bounds), key=lambda rows: rows[1] % 3):
                rows = Rows(begin, end, len(samples), file)
                try:
                    built.append(builder_of(dataset, collate_fn).build(HeapStore(), Task(1, 0, 0, 0, rows=rows)))
                except BuildError:
                    fits = False
            if not fits or len({bytes(part.meta) for part in built}) > 1:
                return
            content = np.frombuffer(bytearray(os.pread(file, built[0].used_nbytes, 0)), np.uint8)
            found = arrived(built[0], content)
            whole = builder_of(dataset, collate_fn).build(store, Task(1, 0, 0, 0))
            assert found == arrived(whole, store.lend(0, 0))
    finally:
        os.close(file)


# With processes -------------------------------------------------------------------------------------------------------

NUM_WORKERS, BATCH_SIZE = 3, 48


def swift_loader(dataset: Any, workers: int = NUM_WORKERS, batch_size: int = BATCH_SIZE, **options: Any) -> Any:
    return make_loader(lambda: dataset, workers=workers, batch_size=batch_size, validate=False, **options)


def data_loader(dataset: Any, workers: int = NUM_WORKERS, batch_size: int = BATCH_SIZE, **options: Any) -> Any:
    return DataLoader(dataset, batch_size, seed=7, num_workers=workers, **{"shuffle": True, **options})


MAKERS = pytest.mark.parametrize("make", [swift_loader, data_loader])

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def together(folder: Path, num_processes: int = NUM_WORKERS, **more: Any) -> datasets.Together:
    """Return samples, of which each of the processes fetches some of the first batch."""
    folder = folder / "begun"
    folder.mkdir(exist_ok=True)
    return datasets.Together(folder=str(folder), num_processes=num_processes, **more)


def epoch_of(loader: Any) -> tuple[list[Any], list[int]]:
    """Return the described batches of an epoch, and how many processes built each."""
    batches = list(loader)
    if isinstance(loader, SwiftLoader):
        loader.close()
    numbers = [len(set(np.asarray(batch.pop("pid")).tolist())) for batch in batches]
    return list(map(described, batches)), numbers


@MAKERS
@pytest.mark.parametrize("in_order", [True, False])
def test_the_first_batch_is_built_by_all_workers_and_is_the_same(make: Any, in_order: bool, tmp_path: Path) -> None:
    reference, _ = epoch_of(make(together(tmp_path, 0), 1))
    loader = make(together(tmp_path), in_order=in_order)
    batches, numbers = epoch_of(loader)
    assert sorted(batches, key=repr) == sorted(reference, key=repr)
    assert sorted(numbers) == [1, 1, 1, 1, NUM_WORKERS]
    if in_order:
        assert batches == reference
        assert numbers[0] == NUM_WORKERS
    assert [loader.metrics("")[f"{name}_total"] for name in ("batches", "samples")] == [5, 240]


@MAKERS
def test_a_short_pass_is_built_by_all_workers(make: Any, tmp_path: Path) -> None:
    reference, _ = epoch_of(make(together(tmp_path, 0), 1, batch_size=120))
    batches, numbers = epoch_of(make(together(tmp_path, 4), 4, batch_size=120))
    assert batches == reference
    assert numbers == [2, 2]


@MAKERS
def test_the_first_batch_after_a_resume_is_built_by_all_workers(make: Any, tmp_path: Path) -> None:
    loader = make(together(tmp_path, 0), 1)
    reference, _ = epoch_of(make(together(tmp_path, 0), 1))
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    state = loader.state_dict()
    del iterator
    if isinstance(loader, SwiftLoader):
        loader.close()
    resumed = make(together(tmp_path))
    resumed.load_state_dict(state)
    batches, numbers = epoch_of(resumed)
    assert batches == reference[2:]
    assert numbers == [NUM_WORKERS, 1, 1]


@MAKERS
@pytest.mark.parametrize("more", [{"text": True}, {"at": 30, "deed": "raise"}])
def test_what_does_not_fit_is_built_as_a_whole(make: Any, more: dict[str, Any], tmp_path: Path) -> None:
    def outcome(num_processes: int, workers: int) -> list[Any]:
        loader, found = make(together(tmp_path, num_processes, **more), workers, shuffle=False), list[Any]()
        for _ in range(2):
            iterator = iter(loader)
            try:
                for batch in iterator:
                    found.append(len(set(np.asarray(batch.pop("pid")).tolist())))
                    found.append(described(batch))
            except datasets.CustomError as error:
                found.append(str(error))
        if isinstance(loader, SwiftLoader):
            loader.close()
        del iterator
        gc.collect()  # the error's traceback refers to the epoch
        return found

    assert outcome(NUM_WORKERS, NUM_WORKERS) == outcome(0, 1)


@MAKERS
def test_memory_is_used_again_unless_the_user_keeps_it(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MIN_BATCH_S", 0.0)
    monkeypatch.setattr(queues, "STEADY_S", -1.0)
    monkeypatch.setattr(queues, "VARIES", -1.0)
    monkeypatch.setattr(memory, "MAX_SHARED_FILES", 4)
    reference, _ = epoch_of(make(together(tmp_path, 0, num_samples=1200), 1, batch_size=24))
    loader = make(together(tmp_path, num_samples=1200), batch_size=24)
    found, kept = list[Any](), list[Any]()
    for step, batch in enumerate(loader):
        batch.pop("pid")
        found.append(described(batch))
        if step % 3 == 0:
            kept.append((step, batch))
        else:
            batch["x"][...] = 7  # nobody else has it
    assert found == reference
    assert [described(batch) for _, batch in kept] == [reference[step] for step, _ in kept]
    if isinstance(loader, SwiftLoader):
        loader.close()


SURVIVED = [Failpoint.WORKER_STARTED, Failpoint.WORKER_SLOT_WRITE, Failpoint.WORKER_AFTER_COMMIT]


@MAKERS
@pytest.mark.parametrize("point", SURVIVED, ids=lambda point: point.value)
@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_a_worker_that_dies_loses_its_part_only(
    make: Any, point: Failpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, _ = epoch_of(make(together(tmp_path, 0), 1))
    marker = tmp_path / "marker"
    set_environ(monkeypatch, VARIABLE, f"{point.value}=SIGKILL,once={marker},hit=1")
    options: dict[str, Any] = {"multiprocessing_context": "forkserver"} if make is data_loader else {}
    batches, numbers = epoch_of(make(together(tmp_path), worker_restarts=3, **options))
    assert marker.exists()
    assert batches == reference
    assert numbers[0] > 1


@MAKERS
@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_a_part_that_ends_two_workers_is_named(make: Any, tmp_path: Path) -> None:
    dataset = together(tmp_path, num_samples=1200, at=20, deed="exit-7")
    loader = make(dataset, worker_restarts=3, shuffle=False)
    with pytest.raises(WorkerDied, match=r"batch 0 of epoch 0 \(dataset indices 16, 17, .* has ended two workers"):
        list(loader)
    if isinstance(loader, SwiftLoader):
        loader.close()


@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("deed", ["raise", "hang"])
@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_a_batch_with_a_sample_that_fails_is_built_as_a_whole(deed: str, on_error: str, tmp_path: Path) -> None:
    def outcome(workers: int) -> tuple[Any, ...]:
        options: dict[str, Any] = {"timeout": 1.0, "worker_restarts": 3, "shuffle": False}
        dataset = together(tmp_path, workers if workers > 1 else 0, at=20, deed=deed)
        with swift_loader(dataset, workers, on_error=on_error, **options) as loader:
            ids = [batch["id"].tolist() for batch in loader]
            return ids, [(one.step, one.index, one.position, one.replaced_by) for one in loader.failures]

    assert outcome(NUM_WORKERS) == outcome(1)
