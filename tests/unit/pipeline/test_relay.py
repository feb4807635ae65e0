from __future__ import annotations

import threading

import pytest

from swift_loader.pipeline.relay import Relay
from tests.support.helpers import wait_until


def test_things_come_out_in_order_and_then_the_end() -> None:
    relay: Relay[int] = Relay(3)
    assert [relay.put(number) for number in range(3)] == [True] * 3
    relay.end()
    assert list(relay) == [0, 1, 2]
    assert list(relay) == []
    assert relay.poll() is None


def test_an_error_comes_after_all_things() -> None:
    relay: Relay[int] = Relay(2)
    relay.put(1)
    relay.end(ValueError("no more"))
    taken = iter(relay)
    assert next(taken) == 1
    with pytest.raises(ValueError, match="no more"):
        next(taken)


def test_a_giver_waits_for_room_and_close_ends_the_wait() -> None:
    relay: Relay[int] = Relay(1)
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.extend(relay.put(number) for number in range(3)))
    thread.start()
    wait_until(lambda: relay.num_waiting == 1 and len(answers) == 1, "one is there, the next one waits")
    assert relay.poll() == 0
    wait_until(lambda: answers == [True, True], "the next one is there")
    relay.close()
    thread.join()
    assert answers == [True, True, False]


def test_a_taker_waits_no_longer_than_its_limit() -> None:
    relay: Relay[int] = Relay(1, timeout_s=0.01, on_timeout=lambda: TimeoutError("none came"))
    with pytest.raises(TimeoutError, match="none came"):
        next(iter(relay))


def test_close_ends_the_takers_wait() -> None:
    relay: Relay[int] = Relay(1)
    taken: list[list[int]] = []
    thread = threading.Thread(target=lambda: taken.append(list(relay)))
    thread.start()
    relay.close()
    thread.join()
    assert taken == [[]]


def test_it_tells_what_it_holds() -> None:
    relay: Relay[int] = Relay(2)
    relay.put(1)
    assert repr(relay) == "<Relay open, 1 of 2>"
    relay.close()
    assert "closed" in repr(relay)
