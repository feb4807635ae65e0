from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swift_loader.scheduler.events import Built, Failed, SampleFailed
from swift_loader.scheduler.sample_failures import SampleFailures

REPORTS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(2, 3), st.integers(0, 2), st.integers(0, 2)), max_size=20, unique=True
)
"""(worker, generation, sequence, position)."""


@given(reports=REPORTS)
def test_an_answer_takes_the_failures_of_its_own_batch_and_the_rest_stays(
    reports: list[tuple[int, int, int, int]],
) -> None:
    failures = SampleFailures()
    for report in reports:
        failures.note(SampleFailed(*report, failure=report), generation=3)
    expected = [report for report in reports if report[1] == 3]
    mine = [report for report in expected if report[0] == 0 and report[2] == 1]
    assert list(failures.take(Built(0, 3, 1, "batch"))) == mine
    assert failures.take(Failed(0, 3, 1, ValueError())) == ()
    assert sorted(failures.take_all()) == sorted(report for report in expected if report not in mine)
    assert failures.take_all() == []


def test_a_report_is_about_one_worker_and_the_last_one_about_a_position_holds() -> None:
    failures = SampleFailures()
    for worker, failure in [(0, "lost with worker 0"), (1, "first"), (1, "second")]:
        failures.note(SampleFailed(worker, 3, 5, position=2, failure=failure), generation=3)
    assert failures.take(Built(1, 3, 5, "rebuilt")) == ("second",)
    assert failures.take_all() == ["lost with worker 0"]
