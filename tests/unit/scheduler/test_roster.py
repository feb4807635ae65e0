from __future__ import annotations

from swift_loader.scheduler.events import Disconnected, Ready
from swift_loader.scheduler.roster import Roster


def test_an_id_is_missing_that_no_worker_has_and_none_is_started_with() -> None:
    roster = Roster(2)
    assert roster.missing() == []
    roster.num_wanted = 5
    assert roster.missing() == [2, 3, 4]
    roster.expect(3)
    assert roster.missing() == [2, 4]
    roster.meet(Ready(7, 4))
    assert roster.missing() == [2]


def test_the_id_of_a_worker_is_taken_until_it_is_gone() -> None:
    roster = Roster(1)
    worker = roster.meet(Disconnected(0, 0))
    assert roster.meet(Disconnected(0, 0)) is worker
    assert roster.missing() == []
    roster.remove(worker)
    assert roster.missing() == [0]


def test_the_highest_ids_are_not_wanted() -> None:
    roster = Roster(3)
    workers = [roster.meet(Ready(10 + number, number)) for number in range(3)]
    roster.num_wanted = 1
    assert [roster.is_wanted(worker) for worker in workers] == [True, False, False]


def test_without_a_number_everybody_is_wanted_and_nobody_is_missing() -> None:
    roster = Roster(None)
    assert roster.is_wanted(roster.meet(Ready(0, 900)))
    assert roster.missing() == []
