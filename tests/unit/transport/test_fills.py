from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swift_loader.transport.fills import Fill, Fills, FillState

Needs = dict[int, set[int]]
"""Owner -> the owners that its value needs."""

graphs = st.integers(1, 8).flatmap(
    lambda count: st.lists(st.sets(st.integers(0, count - 1)), min_size=count, max_size=count).map(
        lambda needs: dict(enumerate(needs))
    )
)


def done_in_order(needs: Needs) -> tuple[list[int], list[tuple[int, int]]]:
    """Do a fill per owner as a writer does; return the owners in order, and (fill, open fill that it needs)."""
    fills, order, cycles = Fills(), list[int](), list[tuple[int, int]]()
    for owner in needs:
        fills.add(Fill(None, owner, "", owner))
    while (fill := fills.next()) is not None:
        owner = int(str(fill.value))
        if fill.state is FillState.WAITING:
            fill.state = FillState.OPEN
            cycles += [(owner, int(str(other.value))) for other in fills.put_first(needs[owner])]
        else:
            assert fill.state is FillState.OPEN
            fill.state = FillState.DONE
            order.append(owner)
    return order, cycles


def reachable(needs: Needs, start: int) -> set[int]:
    found, left = set[int](), list(needs[start])
    while left:
        owner = left.pop()
        if owner not in found:
            found.add(owner)
            left.extend(needs[owner])
    return found


@given(needs=graphs)
def test_each_fill_is_done_once_after_what_it_needs_unless_that_needs_it(needs: Needs) -> None:
    order, cycles = done_in_order(needs)
    assert sorted(order) == sorted(needs)
    for owner, needed in needs.items():
        for other in needed:
            if owner not in reachable(needs, other):
                assert order.index(other) < order.index(owner)
    for owner, other in cycles:
        assert owner in reachable(needs, other) | {other}


@given(needs=graphs)
def test_without_a_cycle_no_fill_needs_an_open_one(needs: Needs) -> None:
    upwards = {owner: {other for other in needed if other > owner} for owner, needed in needs.items()}
    assert done_in_order(upwards)[1] == []


def test_what_an_owner_needs_through_others_comes_first_too() -> None:
    fills = Fills()
    user, used = Fill(None, 0, "", "user"), Fill(None, 1, "", "used")
    fills.add(user)
    fills.add(used)
    fills.link("class", "method")
    fills.link("method", "used")
    fills.link("used", "class")
    user.state = FillState.OPEN
    assert fills.put_first(["class"]) == []
    assert fills.next() is used
    used.state = FillState.DONE
    assert fills.next() is user
    assert fills.put_first(["user"]) == [user]


def test_all_fills_of_an_owner_count() -> None:
    fills = Fills()
    both = [Fill(None, number, "", "owner") for number in range(2)]
    for fill in both:
        fills.add(fill)
    both[0].state = FillState.OPEN
    assert fills.put_first(["owner"]) == [both[0]]
    assert fills.next() is both[1]


def test_without_fills_there_is_no_next_one() -> None:
    assert Fills().next() is None
