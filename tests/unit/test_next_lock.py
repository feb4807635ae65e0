from __future__ import annotations

import os
import threading

import pytest

from swift_loader.next_lock import NextLock


def test_a_turn_within_a_turn_is_an_error() -> None:
    next_lock = NextLock()
    with next_lock.lock():
        next_lock.check_free()
        next_lock.taker = "an iterator"
        assert repr(next_lock) == "<NextLock taken by 'an iterator'>"
        with next_lock.lock(), pytest.raises(RuntimeError, match=r"already within next\(\)"):
            next_lock.check_free()
        next_lock.taker = None
    assert repr(next_lock) == "<NextLock free>"


def test_a_fork_takes_its_turn_while_another_thread_of_its_parent_is_within_one() -> None:
    next_lock, is_taken, is_over = NextLock(), threading.Event(), threading.Event()

    def take() -> None:
        with next_lock.lock():
            next_lock.taker = "an iterator"
            is_taken.set()
            is_over.wait(30)

    thread = threading.Thread(target=take)
    thread.start()
    is_taken.wait(30)
    child = os.fork()
    if not child:
        acquired = threading.Event()

        def try_to() -> None:
            with next_lock.lock():
                next_lock.check_free()
                acquired.set()

        threading.Thread(target=try_to, daemon=True).start()
        os._exit(0 if acquired.wait(10) else 1)
    is_over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
