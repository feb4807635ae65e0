from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.dataloader.copy_probe import CopyProbe, Resemblance, digest_of
from swift_loader.delivery.delivery import Delivery
from swift_loader.scheduler.work import StreamWork


@given(num_workers=st.integers(2, 4), num_turns=st.integers(1, 4), length=st.integers(1, 6), order=st.randoms())
def test_workers_that_give_the_same_have_copies_in_whatever_order_batches_come(
    num_workers: int, num_turns: int, length: int, order: Any
) -> None:
    batches = [(worker, turn) for worker in range(num_workers) for turn in range(length)]
    order.shuffle(batches)
    resemblance = Resemblance(num_workers, num_turns)
    verdicts = [resemblance.note(worker, turn, bytes([turn])) for worker, turn in batches]
    assert False not in verdicts
    assert (True in verdicts) == (length >= num_turns)
    assert resemblance.note_end() or length > num_turns


@given(
    num_workers=st.integers(2, 4),
    num_turns=st.integers(1, 4),
    differing=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_one_batch_that_differs_means_that_there_are_no_copies(
    num_workers: int, num_turns: int, differing: tuple[int, int]
) -> None:
    worker_id, turn = differing[0] % num_workers, differing[1] % num_turns
    resemblance = Resemblance(num_workers, num_turns)
    verdicts = [
        resemblance.note(worker, one, b"other" if (worker, one) == (worker_id, turn) else b"same")
        for one in range(num_turns)
        for worker in range(num_workers)
    ]
    assert next(verdict for verdict in verdicts if verdict is not None) is False


@pytest.mark.parametrize(("lengths", "verdict"), [((2, 2), True), ((2, 1), False), ((0, 0), False), ((0, 2), False)])
def test_short_streams_are_judged_at_their_end(lengths: tuple[int, int], verdict: bool) -> None:
    resemblance = Resemblance(2, 9)
    for worker_id, length in enumerate(lengths):
        for turn in range(length):
            assert resemblance.note(worker_id, turn, b"same") is None
    assert resemblance.note_end() is verdict


def delivery(worker_id: int, turn: int, batch: Any, error: Exception | None = None) -> Delivery:
    return Delivery(batch, 0, turn, (), 0, error, None, StreamWork(0, turn, worker_id, turn))


def taking(deliveries: list[Delivery]) -> Callable[[], Delivery]:
    left = iter(deliveries)
    return lambda: next(left)


def test_what_was_held_back_comes_in_order() -> None:
    verdicts: list[bool] = []
    probe = CopyProbe(2, 16, verdicts.append)
    deliveries = [delivery(0, 0, [1]), delivery(1, 0, [2]), delivery(0, 1, [3])]
    take = taking(deliveries)
    assert [probe.next(take) for _ in range(3)] == deliveries
    assert verdicts == [False]


def test_copies_are_dropped() -> None:
    verdicts: list[bool] = []
    probe = CopyProbe(2, None, verdicts.append)
    take = taking([delivery(worker, turn, turn) for turn in range(16) for worker in (0, 1)])
    assert probe.next(take) is None
    assert verdicts == [True]


def test_an_error_means_that_there_are_no_copies() -> None:
    failed = delivery(0, 0, None, LookupError())
    assert CopyProbe(2, 16, lambda _: None).next(taking([failed])) is failed


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError


@dataclass
class Record:
    number: int


THINGS = [
    1,
    1.0,
    "1",
    Record(1),
    Record(2),
    [1],
    (1,),
    {"a": 1},
    {"b": 1},
    torch.tensor([1.0]),
    torch.tensor([1]),
    torch.tensor([[1.0]]),
    torch.zeros(0),
    torch.zeros(0, 2),
    torch.tensor(1.0),
    torch.tensor([1.0, 2.0]).bfloat16(),
    np.array([1.0]),
    np.array(["a", None], object),
    [torch.tensor([1.0]), 2],
]


def test_different_things_have_different_digests() -> None:
    digests = [digest_of(thing) for thing in THINGS]
    assert None not in digests
    assert all(one != other for one, other in permutations(digests, 2))


def test_equal_things_have_one_digest_however_they_lie_in_memory() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    assert digest_of(whole[:, 1]) == digest_of(whole[:, 1].clone())
    assert digest_of({"a": whole.numpy()[:, 1]}) == digest_of({"a": whole.numpy()[:, 1].copy()})
    assert digest_of(Record(3)) == digest_of(Record(3))


def test_what_can_not_be_pickled_has_no_digest() -> None:
    assert digest_of([Unpicklable()]) is None
