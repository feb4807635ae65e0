from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.transport.slots import FreeSlots


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_slot_in_use_is_never_handed_out_and_all_come_back(data: st.DataObject) -> None:
    slots, capacities, in_use, freed = FreeSlots(), dict[int, int](), set[int](), list[int]()
    for _ in range(data.draw(st.integers(0, 40))):
        action = data.draw(st.sampled_from(["add", "take", "give", "remove"]))
        if action == "add":
            slot = len(capacities)
            capacities[slot] = data.draw(st.integers(0, 100))
            slots.add(slot, capacities[slot])
            in_use.add(slot)
        elif action == "take":
            nbytes = data.draw(st.integers(0, 110))
            expected = next((slot for slot in reversed(freed) if capacities[slot] >= nbytes), None)
            taken = slots.take(nbytes)
            assert taken == expected
            if taken is not None:
                assert taken not in in_use
                freed.remove(taken)
                in_use.add(taken)
        elif in_use:
            slot = data.draw(st.sampled_from(sorted(in_use)))
            in_use.remove(slot)
            if action == "give":
                slots.give(slot)
                freed.append(slot)
            else:
                slots.remove(slot)
        assert len(slots) == len(in_use) + len(freed)
    for slot in in_use:
        slots.give(slot)
    come_back = [slots.take(0) for _ in range(len(slots))]
    assert sorted(slot for slot in come_back if slot is not None) == sorted(in_use | set(freed))
    assert slots.take(0) is None


def test_the_most_recently_freed_slot_is_taken_first() -> None:
    slots = FreeSlots()
    for slot in range(3):
        slots.add(slot, 10)
    for slot in (1, 0, 2):
        slots.give(slot)
    assert [slots.take(10) for _ in range(4)] == [2, 0, 1, None]


@pytest.mark.parametrize("slot", [0, 1])
def test_a_slot_that_is_free_or_unknown_cannot_be_given_back_or_removed(slot: int) -> None:
    slots = FreeSlots()
    slots.add(0, 10)
    slots.give(0)
    with pytest.raises(KeyError):
        slots.give(slot)
    with pytest.raises(KeyError):
        slots.remove(slot)
    assert repr(slots) == "<FreeSlots 1 of 1 free>"


def test_a_removed_slot_does_not_come_back() -> None:
    slots = FreeSlots()
    slots.add(0, 10)
    slots.remove(0)
    assert len(slots) == 0
    assert slots.take(0) is None
    with pytest.raises(KeyError):
        slots.give(0)
