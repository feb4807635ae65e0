from __future__ import annotations

from typing import Any

import pytest

from swift_loader.dataloader.even import EvenEpoch, Votes


class Batches:
    """An epoch of these batches. Errors are raised."""

    number, is_stale = 3, False

    def __init__(self, *batches: Any) -> None:
        self.left = list(batches)
        self.is_over = False

    def next(self) -> Any:
        if not self.left:
            raise StopIteration
        batch = self.left.pop(0)
        if isinstance(batch, Exception):
            raise batch
        return batch

    def position(self) -> Any:
        return "position"

    def end(self) -> None:
        self.is_over = True

    def processes(self) -> list[Any]:
        return []

    def shut_down(self) -> None:
        self.is_over = True

    def close(self) -> None:
        self.left = []


class OtherRanks:
    """Have so many batches."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches, self.num_votes = num_batches, 0

    def all_have(self, has_batch: bool) -> bool:
        self.num_votes += 1
        return has_batch and self.num_votes <= self.num_batches


def even(epoch: Batches, votes: Any) -> EvenEpoch:
    return EvenEpoch(epoch, votes)


@pytest.mark.parametrize(("num_others", "expected"), [(0, []), (2, [1, 2]), (3, [1, 2, 3]), (9, [1, 2, 3])])
def test_an_epoch_ends_with_the_shortest(num_others: int, expected: list[int]) -> None:
    votes = OtherRanks(num_others)
    epoch = even(Batches(1, 2, 3), votes)
    found = []
    while True:
        try:
            found.append(epoch.next())
        except StopIteration:
            break
    assert found == expected
    assert epoch.is_over
    with pytest.raises(StopIteration):
        epoch.next()
    assert votes.num_votes == len(expected) + 1, "after the end nobody votes any more"


def test_an_error_counts_as_a_batch() -> None:
    votes = OtherRanks(9)
    epoch = even(Batches(LookupError("bad"), 2), votes)
    with pytest.raises(LookupError, match="bad"):
        epoch.next()
    assert (epoch.next(), votes.num_votes) == (2, 2)


def test_an_error_is_left_out_if_another_rank_has_ended() -> None:
    epoch = even(Batches(LookupError("bad")), OtherRanks(0))
    with pytest.raises(StopIteration):
        epoch.next()


def test_one_rank_asks_nobody() -> None:
    votes = Votes()
    assert [votes.all_have(True), votes.all_have(False)] == [True, False]


def test_the_rest_is_the_epoch_s_own() -> None:
    batches = Batches(1)
    epoch = even(batches, OtherRanks(1))
    position: Any = epoch.position()
    assert (epoch.number, epoch.is_stale, position) == (3, False, "position")
    assert epoch.processes() == []
    epoch.close()
    assert batches.left == []
    epoch.shut_down()
    assert batches.is_over
