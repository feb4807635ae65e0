from __future__ import annotations

import threading

from swift_loader import batch_key
from tests.support.fake_device import keyed_by


def test_outside_of_a_move_a_key_is_another_each_time() -> None:
    keys = {batch_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(0 <= key < 1 << 64 for key in keys)


def test_within_a_move_it_is_the_batch_s() -> None:
    with keyed_by(5):
        assert [batch_key(), batch_key()] == [5, 5]
        with keyed_by(6):
            assert batch_key() == 6
        assert batch_key() == 5
    assert batch_key() != batch_key()


def test_a_move_in_another_thread_has_another_key() -> None:
    found: list[int] = []
    with keyed_by(5):
        thread = threading.Thread(target=lambda: found.append(batch_key()))
        thread.start()
        thread.join()
    assert found != [5]
