from __future__ import annotations

from typing import Any

import pytest

from swift_loader.dataloader.even import EvenEpoch


class Batches:
    """An epoch of these batches. Errors are raised."""

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

    def end(self) -> None:
        self.is_over = True


class OtherRanks:
    """Have so many batches."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches, self.num_votes = num_batches, 0

    def all_have(self, has_batch: bool) -> bool:
        self.num_votes += 1
        return has_batch and self.num_votes <= self.num_batches


@pytest.mark.parametrize(("num_others", "expected"), [(0, []), (2, [1, "bad"]), (3, [1, "bad", 3]), (9, [1, "bad", 3])])
def test_an_epoch_ends_with_the_shortest_and_an_error_counts_as_a_batch(num_others: int, expected: list[Any]) -> None:
    batches: Any = Batches(1, LookupError("bad"), 3)
    votes: Any = OtherRanks(num_others)
    epoch, found = EvenEpoch(batches, votes), list[Any]()
    while True:
        try:
            found.append(epoch.next())
        except LookupError as error:
            found.append(str(error))
        except StopIteration:
            break
    assert found == expected
    assert batches.is_over
    with pytest.raises(StopIteration):
        epoch.next()
    assert votes.num_votes == len(expected) + 1, "after the end nobody votes any more"
