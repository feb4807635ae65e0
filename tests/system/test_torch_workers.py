"""Workers that do as those of torch's DataLoader do, through a dispatcher."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data

from swift_loader.errors import EncodeError
from swift_loader.scheduler.delivery import Delivery
from swift_loader.scheduler.work import IndexWork, Work, WorkSource
from swift_loader.worker.seeding import Rng
from swift_loader.worker.spec import StartMethod
from swift_loader.worker.torch_worker import Resume, Snapshot
from tests.support.helpers import exhaustive_unless
from tests.support.torch_mode import begin_keys, begin_stream, plan_of, rest_of, started


def batches_of(deliveries: list[Delivery]) -> list[Any]:
    assert [delivery.error for delivery in deliveries] == [None] * len(deliveries)
    return [delivery.batch for delivery in deliveries]


class Keyed(torch.utils.data.Dataset[Any]):
    """Has no length; a sample says its key."""

    def __getitem__(self, key: Any) -> Any:
        if key == "bad":
            raise KeyError(key)
        if key == "stop":
            raise StopIteration
        return key


class InBulk(Keyed):
    """Gives whole batches."""

    def __getitems__(self, keys: Any) -> Any:
        return {"keys": keys}


class Drawn(Keyed):
    """A sample says what was drawn for it."""

    def __getitem__(self, key: Any) -> Any:
        return random.random(), float(np.random.rand()), float(torch.rand(()))


class Informed(Keyed):
    """A sample says what torch tells about the worker."""

    def __getitem__(self, key: Any) -> Any:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return info.id, info.num_workers, info.seed, info.dataset is self, os.environ.get("INITIALISED")


class Numbers(torch.utils.data.IterableDataset[int]):
    """Worker i of n has the numbers that leave i when divided by n, but the more of them the lower i is."""

    def __init__(self, size: int = 30, *, fails_at: int | None = None) -> None:
        self.size, self.fails_at = size, fails_at

    def numbers(self) -> list[int]:
        info = torch.utils.data.get_worker_info()
        worker_id, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        return list(range(worker_id, self.size // (1 + worker_id), num_workers))

    def __iter__(self) -> Iterator[int]:
        for number in self.numbers():
            if number == self.fails_at:
                raise ValueError("no such number")
            yield number


class Resumable(Numbers):
    """Its iterator has a state."""

    def __iter__(self) -> Iterator[int]:
        return ResumableIterator(self.numbers())


class ResumableIterator(Iterator[int]):
    """Counts what was given; says how much of that was before its state was loaded."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.position = numbers, 0

    def __next__(self) -> int:
        if self.position >= len(self.numbers):
            raise StopIteration
        self.position += 1
        return self.numbers[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Stateful(Numbers):
    """Has the state itself."""

    position = 0

    def __iter__(self) -> Iterator[int]:
        numbers = self.numbers()
        while self.position < len(numbers):
            self.position += 1
            yield numbers[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Counting(Keyed):
    """A sample says how many the worker's dataset has given before."""

    count = 0
    bulk = bytes(300_000)
    """Doesn't fit into a message that isn't in a file."""

    def __getitem__(self, key: Any) -> Any:
        self.count += 1
        return self.count - 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "bulk": self.bulk}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        assert state["bulk"] == self.bulk


class Deadly(Keyed):
    """Kills its process for a key, once per file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, key: Any) -> Any:
        marker = self.folder / str(key)
        if marker.exists():
            marker.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return key


# Keys


def test_keys_of_any_kind_reach_the_dataset() -> None:
    many = list(range(100_000))
    with started(Keyed()) as dispatcher:
        for batches in (
            [[0, 1], [2], [5, 5, 5]],
            [["a", "b"], ["c"]],
            [[[1, 2], [3]], [[4]]],
            [[(1, "x")], [None]],
            [many, many[::-1]],
            [],
        ):
            begin_keys(dispatcher, batches)
            assert batches_of(rest_of(dispatcher)) == batches


def test_single_keys_give_single_samples() -> None:
    keys = [3, "a", None, (1, 2)]
    with started(Keyed(), auto_collation=False) as dispatcher:
        begin_keys(dispatcher, keys)
        deliveries = rest_of(dispatcher)
        assert batches_of(deliveries) == keys
        assert [delivery.work.indices for delivery in deliveries] == keys  # type: ignore[union-attr]


def test_getitems_gets_the_keys_and_what_it_returns_is_the_batch() -> None:
    with started(InBulk()) as dispatcher:
        begin_keys(dispatcher, [[1, 2], ("a", "b")])
        assert batches_of(rest_of(dispatcher)) == [{"keys": [1, 2]}, {"keys": ("a", "b")}]


def test_a_mapping_is_a_dataset() -> None:
    with started({"a": 1, "b": 2}) as dispatcher:
        begin_keys(dispatcher, [["a", "b"], ["b"]])
        assert batches_of(rest_of(dispatcher)) == [[1, 2], [2]]


def test_an_error_comes_in_the_place_of_its_batch_and_the_next_one_follows() -> None:
    with started(Keyed()) as dispatcher:
        begin_keys(dispatcher, [[1], ["bad"], [2], ["stop"], [3], [lambda: 0], [4]])
        deliveries = rest_of(dispatcher)
        assert [delivery.batch for delivery in deliveries] == [[1], None, [2], None, [3], None, [4]]
        bad, stop, lost = (deliveries[number].error for number in (1, 3, 5))
        assert type(bad) is KeyError
        assert bad.args == ("bad",)
        assert "fetching a sample, batch 1 of epoch 0 (dataset indices 'bad')" in str(bad.__cause__)
        assert type(stop) is RuntimeError
        assert type(lost) is EncodeError


class Queue(WorkSource):
    """Hands out what was put into it so far."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def next(self) -> Work | None:
        return self.works.pop(0) if self.works else None


def test_work_that_comes_later_is_built() -> None:
    source = Queue()
    with started(Keyed()) as dispatcher:
        dispatcher.begin(source, plan_of(1))
        for step in range(5):
            assert dispatcher.next_batch().is_end
            source.works.append(IndexWork(0, step, [step]))
            assert dispatcher.next_batch().batch == [step]


# The worker as the dataset sees it


def initialise(worker_id: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert info.id == worker_id
    os.environ["INITIALISED"] = f"{worker_id} {random.random()} {np.random.rand()} {torch.rand(())}"


def fail(worker_id: int) -> None:
    raise LookupError("no luck")


def draws_of(worker_id: int, base_seed: int) -> str:
    """Return what a worker of torch's DataLoader draws first."""
    words: Any = torch.utils.data._utils.worker._generate_state(base_seed, worker_id)  # type: ignore[no-untyped-call]
    python, numpy = random.Random(base_seed + worker_id), np.random.RandomState(words)
    drawn = torch.rand((), generator=torch.Generator().manual_seed(base_seed + worker_id))
    return f"{worker_id} {python.random()} {numpy.rand()} {drawn}"


def test_workers_know_who_they_are_and_are_seeded_as_torchs() -> None:
    with started(Informed(), num_workers=3, in_flight=3, worker_init_fn=initialise) as dispatcher:
        begin_keys(dispatcher, [[number] for number in range(40)])
        seen = {batch[0] for batch in batches_of(rest_of(dispatcher))}
    assert {one[0] for one in seen} <= {0, 1, 2}
    assert seen <= {(number, 3, 1234 + number, True, draws_of(number, 1234)) for number in range(3)}


def test_another_base_seed_reaches_the_workers() -> None:
    with started(Informed(), num_workers=1) as dispatcher:
        for base_seed in (1234, 99):
            begin_keys(dispatcher, [[0]], base_seed=base_seed)
            ((sample,),) = batches_of(rest_of(dispatcher))
            assert sample[2] == base_seed


def test_an_error_of_worker_init_fn_reaches_the_loop() -> None:
    with started(Keyed(), worker_init_fn=fail) as dispatcher:
        begin_keys(dispatcher, [[1]])
        error = dispatcher.next_batch().error
        assert type(error) is LookupError
        assert error.args == ("no luck",)
        assert "setting up the worker" in str(error.__cause__)


@pytest.mark.slow
def test_draws_are_the_same_with_any_number_of_workers_and_differ_for_a_repeated_key() -> None:
    seen = []
    for num_workers in (1, 2):
        with started(Drawn(), num_workers=num_workers, rng=Rng.SAMPLE) as dispatcher:
            begin_keys(dispatcher, [[7, 7, 7]] * 6)
            seen.append(batches_of(rest_of(dispatcher)))
    assert seen[0] == seen[1]
    assert len({sample for batch in seen[0] for sample in batch}) == 18


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True])
def test_workers_may_be_interpreters_of_their_own(is_stream: bool) -> None:
    dataset = Numbers() if is_stream else Informed()
    with started(dataset, start_method=StartMethod.SPAWN, is_stream=is_stream) as dispatcher:
        if is_stream:
            begin_stream(dispatcher)
            assert [batch[0] for batch in batches_of(rest_of(dispatcher))] == [0, 1, 4, 5, 8, 9, 12, 13, 16, 20, 24, 28]
        else:
            begin_keys(dispatcher, [[number] for number in range(40)])
            assert {batch[0][0] for batch in batches_of(rest_of(dispatcher))} <= {0, 1}


# Streams


STREAM_CASES = list(itertools.product([1, 2], [1, 4, 100, None], [False, True]))
"""(num_workers, batch_size, drop_last)."""


@pytest.mark.parametrize("case", exhaustive_unless([(2, 4, False)], STREAM_CASES))
def test_a_stream_is_in_torchs_order(case: tuple[int, int | None, bool]) -> None:
    num_workers, batch_size, drop_last = case
    drop_last = drop_last and batch_size is not None
    expected = torch.utils.data.DataLoader(
        Numbers(),
        batch_size=batch_size,
        num_workers=num_workers,
        drop_last=drop_last,
        collate_fn=as_given,
        multiprocessing_context="fork",
    )
    mode: dict[str, Any] = {"is_stream": True, "auto_collation": batch_size is not None, "batch_size": batch_size or 1}
    with started(Numbers(), num_workers=num_workers, drop_last=drop_last, **mode) as dispatcher:
        for _ in range(2):
            begin_stream(dispatcher, num_workers)
            assert batches_of(rest_of(dispatcher)) == list(expected)


def as_given(samples: Any) -> Any:
    return samples


def test_an_error_of_a_stream_ends_its_shard_only() -> None:
    with started(Numbers(fails_at=8), is_stream=True) as dispatcher:
        begin_stream(dispatcher)
        deliveries = rest_of(dispatcher)
    error = next(delivery.error for delivery in deliveries if delivery.error is not None)
    assert type(error) is ValueError
    assert "batch 2 of its shard of the stream, in epoch 0" in str(error.__cause__)
    numbers = [number for delivery in deliveries for number in delivery.batch or []]
    assert numbers == [0, 2, 1, 3, 4, 6, 5, 7, 9, 11, 13]


RESUME_CASES = list(itertools.product([Numbers, Resumable, Stateful], [1, 2, 3]))
"""(stream, snapshot_every)."""


@pytest.mark.parametrize("case", exhaustive_unless([(Resumable, 2)], RESUME_CASES))
def test_a_stream_resumes_after_any_batch(case: tuple[type[Numbers], int]) -> None:
    stream, snapshot_every = case
    mode: dict[str, Any] = {"is_stream": True, "batch_size": 3, "snapshot_every": snapshot_every}
    with started(stream(40), **mode) as dispatcher:
        begin_stream(dispatcher)
        whole = rest_of(dispatcher)
        for stop in range(0, len(whole) + 1, 3):
            resume = {worker_id: resume_after(whole[:stop], worker_id) for worker_id in range(2)}
            begin_stream(dispatcher, resume=resume)
            rest = [delivery.batch for delivery in rest_of(dispatcher)]
            assert sorted(rest) == sorted(delivery.batch for delivery in whole[stop:])
            for worker_id in range(2):
                assert [batch for batch in rest if is_of(batch, worker_id)] == [
                    delivery.batch for delivery in whole[stop:] if is_of(delivery.batch, worker_id)
                ]


def is_of(batch: list[int], worker_id: int) -> bool:
    return batch[0] % 2 == worker_id


def resume_after(deliveries: list[Delivery], worker_id: int) -> bytes:
    """Return where a worker continues after it has delivered these batches."""
    snapshot, num_to_skip = None, 0
    for delivery in deliveries:
        if is_of(delivery.batch, worker_id):
            num_to_skip += 1
            if delivery.snapshot is not None:
                snapshot, num_to_skip = delivery.snapshot, 0
    return Resume(snapshot, num_to_skip).pack()


KILL_CASES = list(itertools.product([Numbers, Resumable, Stateful], [0, 2]))


@pytest.mark.parametrize("case", exhaustive_unless([(Resumable, 2)], KILL_CASES))
def test_a_stream_goes_on_where_its_worker_was_killed(case: tuple[type[Numbers], int], tmp_path: Path) -> None:
    stream, snapshot_every = case
    killer = Deadly(tmp_path)

    def collate(samples: list[int]) -> list[int]:
        return [killer[sample] for sample in samples]

    mode: dict[str, Any] = {"is_stream": True, "batch_size": 2, "snapshot_every": snapshot_every, "collate_fn": collate}
    with started(stream(60), **mode) as dispatcher:
        begin_stream(dispatcher)
        expected = batches_of(rest_of(dispatcher))
        for number in (0, 16, 17, 40):
            (tmp_path / str(number)).touch()
        begin_stream(dispatcher)
        assert batches_of(rest_of(dispatcher)) == expected
        assert not list(tmp_path.iterdir())
        resume = {0: Resume(None, 5).pack()}  # behind a resumed position, too
        begin_stream(dispatcher, resume=resume)
        expected = batches_of(rest_of(dispatcher))
        (tmp_path / "40").touch()
        begin_stream(dispatcher, resume=resume)
        assert batches_of(rest_of(dispatcher)) == expected


def test_the_keys_of_a_killed_worker_are_fetched_by_another_one(tmp_path: Path) -> None:
    batches = [["a", str(number)] for number in range(20)]
    for key in (3, 4, 11):
        (tmp_path / str(key)).touch()
    with started(Deadly(tmp_path)) as dispatcher:
        begin_keys(dispatcher, batches)
        assert batches_of(rest_of(dispatcher)) == batches
    assert not list(tmp_path.iterdir())


def test_the_state_of_a_map_style_dataset_comes_with_its_batches_and_is_loaded() -> None:
    with started(Counting(), num_workers=1, snapshot_every=2, rng=Rng.SAMPLE) as dispatcher:
        begin_keys(dispatcher, [[0, 1]] * 5)
        deliveries = rest_of(dispatcher)
        assert [delivery.batch for delivery in deliveries] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
        assert [delivery.snapshot is not None for delivery in deliveries] == [True, False, True, False, True]
        state = deliveries[2].snapshot
        assert state is not None
        assert Snapshot.unpack(state) == Snapshot(3, dataset={"count": 6, "bulk": Counting.bulk})
        begin_keys(dispatcher, [[0, 1]] * 2, resume={0: Resume(state).pack()})
        assert batches_of(rest_of(dispatcher)) == [[6, 7], [8, 9]]
