from __future__ import annotations

import gc
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.transport.slots import LARGE_AFTER, SMALL_AFTER, RecycledSlots


@dataclass
class Bytes:
    nbytes: int
    memory: memoryview = field(init=False)

    def __post_init__(self) -> None:
        self.memory = memoryview(bytearray(self.nbytes))


class Slots(RecycledSlots[Bytes]):
    """Slots of exactly the size that is asked for."""

    def __init__(self, *capacities: int, max_free: int | None = None) -> None:
        super().__init__(max_free)
        self.dropped: list[int] = []
        for nbytes in capacities:
            self.release(self.adopt(Bytes(nbytes)))

    def make(self, slot: int, nbytes: int) -> Bytes:
        return Bytes(nbytes)

    def drop(self, slot: int) -> None:
        self.dropped.append(slot)

    def use(self, *needs: int) -> list[int]:
        """Take a slot for each need in turn; return those that were given up."""
        known = len(self.dropped)
        for nbytes in needs:
            self.release(self.take(nbytes)[0])
        return self.dropped[known:]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_slot_in_use_is_never_handed_out_and_all_come_back(data: st.DataObject) -> None:
    slots, capacities, in_use, freed = Slots(), dict[int, int](), set[int](), list[int]()
    for _ in range(data.draw(st.integers(0, SMALL_AFTER - 1))):  # later, some are given up
        for _ in range(data.draw(st.integers(0, 5))):
            if not in_use:
                break
            slot = data.draw(st.sampled_from(sorted(in_use)))
            in_use.remove(slot)
            if data.draw(st.booleans()):
                slots.release(slot)
                freed.append(slot)
            else:
                slots.retire(slot)
        nbytes = data.draw(st.integers(0, 110_000))
        fitting = [capacities[slot] for slot in freed if capacities[slot] >= nbytes]
        taken, memory = slots.take(nbytes)
        assert taken not in in_use
        if fitting:
            snug = max(nbytes + nbytes // 8, nbytes + 4096)
            assert nbytes <= memory.nbytes == capacities[taken] <= max(min(fitting), snug)
            freed.remove(taken)
        else:
            assert taken == len(capacities)
            capacities[taken] = nbytes
        in_use.add(taken)
        assert len(slots) == len(in_use) + len(freed)


def test_the_most_recently_freed_slot_is_taken_first() -> None:
    slots = Slots()
    for slot in [slots.take(10)[0] for _ in range(3)][::-1]:
        slots.release(slot)
    assert [slots.take(10)[0] for _ in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("slot", [0, 1])
def test_a_slot_that_is_free_or_unknown_cannot_be_given_back_or_retired(slot: int) -> None:
    slots = Slots(10)
    with pytest.raises(KeyError):
        slots.release(slot)
    with pytest.raises(KeyError):
        slots.retire(slot)
    assert repr(slots) == "<Slots 1 of 1 free>"


def test_a_slot_that_is_lent_comes_back_with_its_last_view() -> None:
    slots = Slots()
    slot, _ = slots.take(100)
    view = slots.lend(slot, 80)[10:20]
    assert slots.take(100)[0] == 1
    del view
    gc.collect()
    assert slots.take(100)[0] == slot


def test_a_batch_that_fills_little_of_its_slot_is_copied_out() -> None:
    slots = Slots()
    slot, memory = slots.take(100)
    memory[:] = 7
    copied = slots.lend(slot, 40)
    assert copied.tolist() == [7] * 40
    assert slots.take(100)[0] == slot


def test_free_slots_beyond_a_limit_are_given_up() -> None:
    slots = Slots(10, 10, 10, max_free=2)
    assert len(slots) == 2


def test_outgrown_slots_are_given_up() -> None:
    slots = Slots(*[10_000] * 5, 20_000)
    assert slots.use(*[20_000] * SMALL_AFTER, *[20_000] * SMALL_AFTER) == [0, 1, 2, 3, 4]
    assert len(slots) == 1


def test_a_slot_that_is_needed_now_and_then_stays() -> None:
    slots = Slots(10_000, 90_000)
    assert slots.use(*[90_000, *[10_000] * 6] * 100) == []


def test_an_exception_does_not_cost_the_slots_of_the_others() -> None:
    slots = Slots(*[1_000_000] * 4)
    assert slots.use(*[*[1_000_000] * 31, 8_000_000] * 20) == []
    assert len(slots) == 5


def test_slots_that_are_far_too_large_are_given_up_after_a_while_and_not_before() -> None:
    slots = Slots(*[8_000_000] * 4)
    assert slots.use(8_000_000, *[100_000] * (LARGE_AFTER - 2)) == []
    assert sorted(slots.use(*[100_000] * (2 * LARGE_AFTER))) == [0, 1, 2, 3]
    assert slots.take(100_000)[0] == 4


def test_a_slot_in_use_is_not_given_up() -> None:
    slots = Slots(10_000, 10_000)
    taken, _ = slots.take(10_000)
    assert taken == 1
    assert slots.use(*[20_000] * 2 * SMALL_AFTER) == [0]
    slots.release(taken)
    assert slots.use(*[20_000] * 2 * SMALL_AFTER) == [1]
