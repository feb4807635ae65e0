from __future__ import annotations

import os
import threading

import pytest

from swift_loader.next_lock import Turns


def test_a_turn_within_a_turn_is_an_error() -> None:
    turns = Turns()
    with turns.lock():
        turns.check_free()
        turns.taker = "an iterator"
        assert repr(turns) == "<Turns taken by 'an iterator'>"
        with turns.lock(), pytest.raises(RuntimeError, match=r"already within next\(\)"):
            turns.check_free()
        turns.taker = None
    assert repr(turns) == "<Turns free>"


def test_a_fork_takes_its_turn_while_another_thread_of_its_parent_is_within_one() -> None:
    turns, is_taken, is_over = Turns(), threading.Event(), threading.Event()

    def take() -> None:
        with turns.lock():
            turns.taker = "an iterator"
            is_taken.set()
            is_over.wait(30)

    thread = threading.Thread(target=take)
    thread.start()
    is_taken.wait(30)
    child = os.fork()
    if not child:
        acquired = threading.Event()

        def try_to() -> None:
            with turns.lock():
                turns.check_free()
                acquired.set()

        threading.Thread(target=try_to, daemon=True).start()
        os._exit(0 if acquired.wait(10) else 1)
    is_over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
