"""How a builder uses its slots."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from swift_loader.errors import SharedMemoryFull
from swift_loader.transport.arena import MIN_FIRST_BYTES
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.codec import decode, decode_bytes
from swift_loader.transport.messages import MAX_INLINE_BYTES, NO_SLOT, Batch, FailureStage
from swift_loader.transport.task import Task
from swift_loader.worker.build import BatchBuilder
from swift_loader.worker.failure import BuildError
from swift_loader.worker.generators import preserved_generators
from tests.support.specs import spec_of

SETUP = spec_of()


class Store:
    """Slots on the heap, which remember who has them."""

    def __init__(self, limit: float = float("inf")) -> None:
        self.limit = limit
        self.memory: list[NDArray[np.uint8]] = []
        self.taken: set[int] = set()

    def take(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        if nbytes > self.limit:
            raise SharedMemoryFull(12, "no memory")
        self.memory.append(np.empty(nbytes, np.uint8))
        self.taken.add(len(self.memory) - 1)
        return len(self.memory) - 1, self.memory[-1]

    def release(self, slot: int) -> None:
        self.taken.remove(slot)

    def read(self, batch: Batch) -> Any:
        memory = self.memory[batch.slot] if batch.slot != NO_SLOT else np.empty(0, np.uint8)
        meta = memoryview(batch.meta)
        if not meta:
            meta = memory[batch.meta_offset : batch.meta_offset + batch.meta_nbytes].data
        return decode(meta, batch.num_blocks, memory, Definitions())


class Rows:
    """Sample i is a row of i's, as long as `size` says."""

    def __init__(self, size: Callable[[int], int] = lambda _: 1000, num_samples: int = 40) -> None:
        self.size, self.num_samples = size, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return np.full(self.size(index), index)


def builder_of(dataset: Any, **options: Any) -> BatchBuilder:
    spec = replace(SETUP, options=replace(SETUP.options, **options))
    return BatchBuilder(dataset, len(dataset), spec, Definitions())


def test_each_batch_is_in_one_slot() -> None:
    builder, store = builder_of(Rows()), Store()
    batches = [builder.build(store, Task(1, step, 0, step)) for step in range(4)]
    assert store.taken == {batch.slot for batch in batches}
    for step, batch in enumerate(batches):
        assert (store.read(batch)[:, 0] == range(4 * step, 4 * step + 4)).all()
        assert 4 * 8000 <= batch.used_nbytes <= len(store.memory[batch.slot])


@pytest.mark.parametrize("collate_fn", [None, np.stack], ids=["into the slot", "elsewhere"])
def test_a_large_first_batch_takes_its_slot_at_once(collate_fn: Any) -> None:
    builder, store = builder_of(Rows(lambda _: MIN_FIRST_BYTES // 8), collate_fn=collate_fn), Store()
    batch = builder.build(store, Task(1, 0, 0, 0))
    assert (len(store.memory), store.taken) == (1, {batch.slot})
    assert (store.read(batch)[:, 0] == range(4)).all()


def test_a_large_first_batch_that_fails_leaves_no_slot_behind() -> None:
    def collate(samples: list[Any], memory: Any) -> Any:
        memory.empty((MIN_FIRST_BYTES,), np.uint8)
        raise ValueError(len(samples))

    builder, store = builder_of(Rows(), collate_fn=collate), Store()
    with pytest.raises(BuildError):
        builder.build(store, Task(1, 0, 0, 0))
    assert (len(store.memory), store.taken) == (1, set())


def test_a_batch_that_outgrows_its_slot_moves_to_a_larger_one() -> None:
    builder, store = builder_of(Rows(lambda index: 100 if index < 8 else 5000)), Store()
    batches = [builder.build(store, Task(1, step, 0, step)) for step in range(3)]
    assert store.taken == {batch.slot for batch in batches}
    assert (store.read(batches[2]) == np.arange(8, 12)[:, None]).all()


def test_a_batch_without_bulk_data_has_no_slot_and_gives_back_the_one_it_took() -> None:
    builder, store = builder_of(Rows(lambda index: 1000 if index < 8 else 2), collate_fn=list), Store()
    last = [builder.build(store, Task(1, step, 0, step)) for step in range(3)][-1]
    assert last.slot == NO_SLOT
    assert len(store.taken) == 2
    assert [row.tolist() for row in store.read(last)] == [[index] * 2 for index in range(8, 12)]


def test_a_large_structure_travels_in_the_slot() -> None:
    def with_text(samples: Sequence[Any]) -> str:
        return "x" * (MAX_INLINE_BYTES + 1)

    builder, store = builder_of(Rows(), collate_fn=with_text), Store()
    batch = builder.build(store, Task(1, 0, 0, 0))
    assert not batch.meta
    assert batch.slot != NO_SLOT
    assert store.read(batch) == "x" * (MAX_INLINE_BYTES + 1)


def test_a_batch_that_draws_without_seeds_is_built_again_in_one_slot() -> None:
    def draw(samples: Sequence[Any]) -> NDArray[np.float64]:
        return np.full(1000, random.random())

    with preserved_generators():
        builder, store = builder_of(Rows(), collate_fn=draw), Store()
        first = store.read(builder.build(store, Task(1, 0, 0, 0)))
        again = store.read(builder.build(store, Task(1, 1, 0, 0)))
    assert (first == again).all()
    assert len(store.taken) == 2


@pytest.mark.parametrize("stage", [FailureStage.COLLATE, FailureStage.ENCODE])
def test_a_batch_that_fails_leaves_no_slot_behind(stage: FailureStage) -> None:
    def collate(samples: Sequence[Any]) -> Any:
        if samples[0][0] < 8:
            return np.stack(samples)
        if stage is FailureStage.COLLATE:
            raise KeyError("field")
        return (_ for _ in ())

    builder, store = builder_of(Rows(), collate_fn=collate), Store()
    for step in range(2):
        builder.build(store, Task(1, step, 0, step))
    with pytest.raises(BuildError) as caught:
        builder.build(store, Task(1, 2, 0, 2))
    assert caught.value.stage is stage
    assert len(store.taken) == 2


def test_a_slot_that_cannot_be_had_is_an_error_of_the_encoding() -> None:
    builder = builder_of(Rows())
    with pytest.raises(BuildError) as caught:
        builder.build(Store(limit=100), Task(1, 0, 0, 0))
    assert caught.value.stage is FailureStage.ENCODE
    assert isinstance(caught.value.__cause__, SharedMemoryFull)


def test_the_users_encoder_makes_the_bytes() -> None:
    builder, store = builder_of(Rows(), batch_encoder=lambda batch: batch.astype(np.uint8).tobytes()), Store()
    batch = builder.build(store, Task(1, 0, 0, 2))
    data = decode_bytes(memoryview(batch.meta), store.memory[batch.slot])
    assert data == bytes([8] * 1000 + [9] * 1000 + [10] * 1000 + [11] * 1000)


def test_a_single_large_batch_does_not_make_the_following_slots_large() -> None:
    builder, store = builder_of(Rows(lambda index: 9000 if 4 <= index < 8 else 1000)), Store()
    batches = [builder.build(store, Task(1, step, 0, step)) for step in range(4)]
    assert len(store.memory[batches[3].slot]) < 2 * batches[0].used_nbytes


def test_another_plan_gives_other_batches() -> None:
    builder, store = builder_of(Rows()), Store()
    builder.use_plan(replace(SETUP.plan, batch_size=2))
    assert (store.read(builder.build(store, Task(1, 0, 0, 3)))[:, 0] == [6, 7]).all()
    assert builder.counters.samples == []
