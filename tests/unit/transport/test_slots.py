from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.transport.slots import LARGE_AFTER, SMALL_AFTER, FreeSlots


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_slot_in_use_is_never_handed_out_and_all_come_back(data: st.DataObject) -> None:
    slots, capacities, in_use, freed = FreeSlots(), dict[int, int](), set[int](), list[int]()
    for _ in range(data.draw(st.integers(0, 40))):
        action = data.draw(st.sampled_from(["add", "take", "give", "remove"]))
        if action == "add":
            slot = len(capacities)
            capacities[slot] = data.draw(st.integers(0, 100_000))
            slots.add(slot, capacities[slot])
            in_use.add(slot)
        elif action == "take":
            nbytes = data.draw(st.integers(0, 110_000))
            fitting = [capacities[slot] for slot in freed if capacities[slot] >= nbytes]
            taken = slots.take(nbytes)
            assert (taken is None) == (not fitting)
            if taken is not None:
                snug = max(nbytes + nbytes // 8, nbytes + 4096)
                assert capacities[taken] >= nbytes
                assert capacities[taken] == min(fitting) or capacities[taken] <= snug
            if taken is not None:
                assert taken not in in_use
                freed.remove(taken)
                in_use.add(taken)
        elif in_use:
            slot = data.draw(st.sampled_from(sorted(in_use)))
            in_use.remove(slot)
            if action == "give":
                slots.release(slot)
                freed.append(slot)
            else:
                slots.remove(slot)
        assert len(slots) == len(in_use) + len(freed)
    for slot in in_use:
        slots.release(slot)
    come_back = [slots.take(0) for _ in range(len(slots))]
    assert sorted(slot for slot in come_back if slot is not None) == sorted(in_use | set(freed))
    assert slots.take(0) is None


def test_the_most_recently_freed_slot_is_taken_first() -> None:
    slots = FreeSlots()
    for slot in range(3):
        slots.add(slot, 10)
    for slot in (1, 0, 2):
        slots.release(slot)
    assert [slots.take(10) for _ in range(4)] == [2, 0, 1, None]


@pytest.mark.parametrize("slot", [0, 1])
def test_a_slot_that_is_free_or_unknown_cannot_be_given_back_or_removed(slot: int) -> None:
    slots = FreeSlots()
    slots.add(0, 10)
    slots.release(0)
    with pytest.raises(KeyError):
        slots.release(slot)
    with pytest.raises(KeyError):
        slots.remove(slot)
    assert repr(slots) == "<FreeSlots 1 of 1 free>"


def slots_of(*capacities: int) -> FreeSlots:
    slots = FreeSlots()
    for slot, capacity in enumerate(capacities):
        slots.add(slot, capacity)
        slots.release(slot)
    return slots


def use(slots: FreeSlots, *needs: int) -> list[int]:
    """Take a slot for each need in turn, making one where none fits; return those that were given up."""
    given_up = []
    for nbytes in needs:
        taken = slots.take(nbytes)
        given_up += slots.evict()
        if taken is None:
            taken = len(slots) + 1000 + len(given_up)
            slots.add(taken, nbytes)
        slots.release(taken)
    return given_up


def test_outgrown_slots_are_given_up() -> None:
    slots = slots_of(*[10_000] * 5, 20_000)
    assert use(slots, *[20_000] * SMALL_AFTER, *[20_000] * SMALL_AFTER) == [0, 1, 2, 3, 4]
    assert len(slots) == 1


def test_a_slot_that_is_needed_now_and_then_stays() -> None:
    slots = slots_of(10_000, 90_000)
    assert use(slots, *[90_000, *[10_000] * 6] * 100) == []


def test_an_exception_does_not_cost_the_slots_of_the_others() -> None:
    slots = slots_of(*[1_000_000] * 4)
    assert use(slots, *[*[1_000_000] * 31, 8_000_000] * 20) == []
    assert len(slots) == 5


def test_slots_that_are_far_too_large_are_given_up_after_a_while_and_not_before() -> None:
    slots = slots_of(*[8_000_000] * 4)
    assert use(slots, 8_000_000, *[100_000] * (LARGE_AFTER - 2)) == []
    assert sorted(use(slots, *[100_000] * (2 * LARGE_AFTER))) == [0, 1, 2, 3]
    assert slots.take(100_000) is not None


def test_a_slot_in_use_is_not_given_up() -> None:
    slots = slots_of(10_000, 10_000)
    taken = slots.take(10_000)
    assert taken == 1
    assert use(slots, *[20_000] * 2 * SMALL_AFTER) == [0]
    slots.release(taken)
    assert use(slots, *[20_000] * 2 * SMALL_AFTER) == [1]
