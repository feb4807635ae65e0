from __future__ import annotations

import threading

from swift_loader.executors.thread.stacks import stack_of


def test_a_stack_begins_with_the_users_code() -> None:
    began, end = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    began.wait()
    first, *_ = stack_of(thread).splitlines()
    end.set()
    thread.join()
    assert first.endswith("in work")
    assert __file__ in first


def test_a_thread_that_has_ended_has_no_stack() -> None:
    thread = threading.Thread(target=lambda: None)
    assert stack_of(thread) == ""
    thread.start()
    thread.join()
    assert stack_of(thread) == ""
