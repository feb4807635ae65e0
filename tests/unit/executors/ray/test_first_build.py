from __future__ import annotations

from swift_loader.executors.ray.first_build import Patience, Step


def test_steps_are_taken_once_when_they_are_due_if_they_are_about_what_lasts() -> None:
    taken: list[str] = []
    is_building = [False]
    steps = [
        Step(30.0, True, lambda: taken.append("builds")),
        Step(10.0, False, lambda: taken.append("no place")),
        Step(None, False, lambda: taken.append("never")),
        Step(20.0, False, lambda: taken.append("still no place")),
    ]
    patience = Patience(100.0, lambda: is_building[0], steps)

    assert patience.left_s(lambda: 104.0) == 6.0
    assert patience.left_s(lambda: 111.0) == 9.0
    assert taken == ["no place"]
    is_building[0] = True
    assert patience.left_s(lambda: 121.0) == 9.0
    assert patience.left_s(lambda: 131.0) is None
    assert taken == ["no place", "builds"]
