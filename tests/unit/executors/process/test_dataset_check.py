from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.errors import DatasetMismatch
from swift_loader.executors.process.dataset_check import DatasetCheck
from swift_loader.transport.reports import BuildReport, Verdict

CHECKSUMS = st.dictionaries(st.integers(0, 5), st.integers(0, 1), max_size=4)


@given(reports=st.lists(CHECKSUMS, max_size=6))
def test_a_sample_is_compared_with_the_first_checksum_of_its_index(reports: list[dict[int, int]]) -> None:
    check = DatasetCheck()
    first: dict[int, int] = {}
    for checksums in reports:
        differing = check.compare(BuildReport(9, 3, tuple(checksums.items())), "worker 1")
        assert differing == [index for index, value in checksums.items() if first.get(index, value) != value]
        first = checksums | first


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (BuildReport(8, 3), "worker 1 built a dataset of 8 samples, but the first one has 9. "),
        (BuildReport(9, 4), "worker 1 built a dataset with another hash seed than the first one"),
    ],
)
def test_another_length_or_hash_seed_is_certainly_another_dataset(report: BuildReport, text: str) -> None:
    check = DatasetCheck()
    assert check.compare(BuildReport(9, 3), "the template") == []
    for _ in range(2):  # the first report stays the one to compare with
        with pytest.raises(DatasetMismatch, match=re.escape(text)):
            check.compare(report, "worker 1")
    assert check.compare(BuildReport(9, 3), "worker 2") == []


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (Verdict.RANDOM, "its constructor gives another dataset each time"),
        (Verdict.UNKNOWN, "either its constructor uses a random source"),
        (Verdict.CHANGED, "length, hash seed, working directory and environment are the same"),
    ],
)
def test_a_sample_that_shows_another_dataset_is_an_error_with_the_reason(verdict: Verdict, reason: str) -> None:
    text = f"worker 1 built a dataset whose sample at dataset index 5 differs from that of the first one: {reason}"
    with pytest.raises(DatasetMismatch, match=f"{re.escape(text)}.*validate=False turns off this check"):
        DatasetCheck().settle([2, 5], {2: Verdict.UNSTABLE, 5: verdict}, "worker 1")


def test_samples_that_change_with_each_fetch_or_have_no_verdict_show_nothing() -> None:
    check = DatasetCheck()
    check.settle([2, 5], {2: Verdict.UNSTABLE}, "worker 1")
    check.settle([], {2: Verdict.RANDOM}, "worker 1")
    assert repr(check) == "<DatasetCheck of nothing>"
    check.compare(BuildReport(9, 3), "worker 1")
    assert repr(check) == "<DatasetCheck of 9 samples>"
