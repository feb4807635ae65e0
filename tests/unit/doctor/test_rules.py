"""What follows from the facts: one test per judgement, without a process."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.doctor.diagnosis import Diagnosis
from swift_loader.doctor.facts import (
    Batches,
    Construction,
    Container,
    Contention,
    Digests,
    Draws,
    Ended,
    Evidence,
    Failure,
    FirstFailing,
    Growth,
    Habits,
    Holder,
    Leaf,
    Line,
    OtherBuild,
    Resumed,
    Sample,
    SlowAgain,
    Stacks,
    Unsendable,
)
from swift_loader.doctor.findings import Finding, Severity, Verdict, quoted, sorted_findings
from swift_loader.doctor.rules.faults import judge_faults
from swift_loader.doctor.rules.leaves import judge_leaves, ragged_leaves
from swift_loader.doctor.rules.memory import judge_memory
from swift_loader.doctor.rules.randomness import differing, judge_randomness
from swift_loader.doctor.rules.sharing import judge_sharing
from swift_loader.doctor.rules.timing import judge_time, timing
from swift_loader.doctor.rules.workers import workers_needed
from swift_loader.doctor.settings import Settings

BUILT = Construction("Photos", 0.1, 0.2, (10, 10, 10), "", "", (), (), None)
ARRAY = Leaf("['x']", "numpy.ndarray", "float32", (3,), 12)
A, B = b"a", b"b"


def sample(index: int, *leaves: Leaf, took_s: float = 0.001, cpu_s: float = 0.001) -> Sample:
    return Sample(index, took_s, cpu_s, leaves or (ARRAY,))


def only(verdict: Verdict) -> Finding:
    assert len(verdict.findings) == 1, verdict.findings
    return verdict.findings[0]


# Randomness ----------------------------------------------------------------------------------------------------------


def test_samples_that_differ_are_named_by_index_and_leaf() -> None:
    one = {0: {"": A}, 1: {"['x']": A, "['y']": A}, 2: {"": A}}
    other = {0: {"": A}, 1: {"['x']": A, "['y']": B}}
    assert differing(one, other) == {1: "['y']"}


def test_equal_samples_are_healthy() -> None:
    equal = {0: {"": A}, 1: {"": B}}
    evidence = Evidence(
        digests=Digests(equal, equal),
        other_build=OtherBuild(10, equal, {0: ("time.time at a.py:3",)}, ("os.urandom at a.py:9",)),
        draws=Draws(2, {"random": (0, 1)}, (), ()),
        resumed=Resumed(2, 2, "", is_mismatch=False),
    )
    verdict = judge_randomness(evidence)
    assert verdict.findings == []
    assert any("another process" in line for line in verdict.healthy)
    assert any("samples draw from random" in line for line in verdict.healthy)


def test_a_generator_that_the_dataset_holds_is_blamed_before_the_clock() -> None:
    evidence = Evidence(
        digests=Digests({0: {"": A}}, {0: {"": B}}),
        other_build=OtherBuild(10, {0: {"": B}}, {0: ("time.time at a.py:3",)}, ()),
        draws=Draws(1, {"dataset.rng": (0,)}, ("dataset.rng",), ()),
    )
    finding, _ = judge_randomness(evidence).findings
    assert finding.severity is Severity.FAULT
    assert "dataset.rng" in finding.evidence
    assert "sample_rng()" in finding.remedy
    assert finding.indices == (0,)


def test_a_dataset_that_differs_from_build_to_build_is_blamed_on_its_constructor() -> None:
    evidence = Evidence(
        digests=Digests({0: {"": A}}, {0: {"": A}}),
        other_build=OtherBuild(10, {0: {"": B}}, {}, ("os.urandom at a.py:9",)),
    )
    finding, _ = judge_randomness(evidence).findings
    assert "the constructor uses os.urandom at a.py:9" in finding.evidence
    assert "another process" in finding.what


def test_a_held_generator_without_a_difference_is_a_warning() -> None:
    equal = {0: {"": A}}
    evidence = Evidence(digests=Digests(equal, equal), draws=Draws(1, {"dataset.rng": (0,)}, ("dataset.rng",), ()))
    resumed = Resumed(8, 2, "", is_mismatch=False)
    assert only(judge_randomness(replace(evidence, resumed=resumed))).severity is Severity.WARNING
    note = judge_randomness(evidence).findings[-1]
    assert note.severity is Severity.NOTE
    assert "wasn't checked: it takes too long" in note.what
    small = replace(evidence, construction=replace(BUILT, lengths=(3, 3, 3)))
    assert "the dataset is too small" in judge_randomness(small).findings[-1].what


@pytest.mark.parametrize(("is_mismatch", "what"), [(True, "resume exactly"), (False, "can't run this dataset")])
def test_a_run_that_fails_is_told_from_one_that_differs(is_mismatch: bool, what: str) -> None:
    finding = only(judge_randomness(Evidence(resumed=Resumed(8, 2, "it differs", is_mismatch))))
    assert what in finding.what
    assert "it differs" in finding.evidence


# Leaves --------------------------------------------------------------------------------------------------------------


def test_leaves_of_several_shapes_are_counted_with_their_first_index() -> None:
    long = replace(ARRAY, shape=(4,))
    ragged = ragged_leaves([sample(0), sample(5, long), sample(6), sample(3, long), sample(9)])
    assert [(one.path, one.forms) for one in ragged] == [("['x']", (("float32 (3,)", 3, 0), ("float32 (4,)", 2, 3)))]


def test_a_leaf_that_some_samples_lack_is_ragged() -> None:
    extra = replace(ARRAY, path="['mask']")
    (ragged,) = ragged_leaves([sample(0, ARRAY, extra), sample(1), sample(2, ARRAY, extra)])
    assert ragged.path == "['mask']"
    assert ragged.forms[1] == ("missing", 1, 1)


def test_text_of_any_length_is_not_ragged() -> None:
    texts = [sample(index, Leaf("['name']", "str", nbytes=index)) for index in range(3)]
    assert judge_leaves(Evidence(samples=tuple(texts))).findings == []


def test_ragged_leaves_that_the_users_collate_takes_are_a_warning() -> None:
    samples = (sample(0), sample(1, replace(ARRAY, shape=(4,))))
    collated = Batches(2, (0.1,), (0.01,), 28)
    assert only(judge_leaves(Evidence(samples=samples, batches=collated))).severity is Severity.WARNING
    failed = Batches(2, (), (), 0, "ValueError: shapes differ")
    finding = only(judge_leaves(Evidence(samples=samples, batches=failed)))
    assert finding.severity is Severity.FAULT
    assert "ValueError: shapes differ" in finding.evidence


def test_double_precision_is_a_note_and_objects_are_a_warning() -> None:
    doubles, objects = replace(ARRAY, dtype="float64"), replace(ARRAY, path="['o']", dtype="object")
    verdict = judge_leaves(Evidence(samples=(sample(0, doubles, objects),)))
    assert [one.severity for one in verdict.findings] == [Severity.WARNING, Severity.NOTE]
    number = Leaf("['y']", "numpy.float64", "float64", (), 8)
    assert judge_leaves(Evidence(samples=(sample(0, number),))).findings == []


# Sharing and memory --------------------------------------------------------------------------------------------------


def test_what_can_be_shared_is_healthy() -> None:
    verdict = judge_sharing(Evidence(construction=BUILT))
    assert verdict.findings == []
    assert len(verdict.healthy) == 2


def test_open_files_are_named_by_their_path() -> None:
    built = replace(BUILT, holders=(Holder(".file", "h5py.File", "an open HDF5 file"),), hazards="it opened 5 (a.h5)")
    finding = only(judge_sharing(Evidence(construction=built)))
    assert "dataset.file is an open HDF5 file" in finding.evidence
    assert "it opened 5 (a.h5)" in finding.evidence


def test_what_can_not_be_sent_is_named_by_its_path_and_type() -> None:
    built = replace(BUILT, unsendable=Unsendable(".lock", "Lock", "TypeError: no"), library_threads=("jemalloc",))
    notes, warning = judge_sharing(Evidence(construction=built)).findings
    assert notes.severity is Severity.NOTE
    assert "dataset.lock is a Lock: TypeError: no" in warning.evidence


def test_a_large_container_is_counted_for_all_workers() -> None:
    containers = (Container(".paths", "list", 1_000_000, 80 << 20), Container(".few", "list", 1000, 1000))
    finding = only(judge_memory(Evidence(construction=BUILT, containers=containers), 4))
    assert "dataset.paths" in finding.what
    assert "320 MiB in 4 workers" in finding.evidence


def test_a_container_that_grows_with_the_samples_is_told() -> None:
    samples = tuple(sample(index) for index in range(10))
    growths = (Growth(".cache", "dict", 0, 10), Growth(".stats", "dict", 0, 1))
    finding = only(judge_memory(Evidence(construction=BUILT, samples=samples, growths=growths), 4))
    assert "dataset.cache" in finding.evidence
    assert "stats" not in finding.evidence


# Time ----------------------------------------------------------------------------------------------------------------


def test_the_first_sample_warms_up_and_is_not_counted() -> None:
    seen = timing([sample(0, took_s=1.0), *(sample(index) for index in range(1, 11))])
    assert seen is not None
    assert seen.max_s == 0.001
    assert seen.num_samples == 11


def test_waiting_for_a_core_is_not_waiting_for_data() -> None:
    samples = [sample(index, took_s=0.004) for index in range(11)]
    alone, busy = timing(samples), timing(samples, Contention(0.030))
    assert alone is not None
    assert busy is not None
    assert alone.cpu_share == pytest.approx(0.25)
    assert alone.bound.startswith("mostly waiting")
    assert busy.bound == "CPU-bound"


def test_only_samples_that_are_slow_each_time_are_told() -> None:
    samples = tuple(sample(index, took_s=0.5 if index in {3, 4} else 0.001) for index in range(50))
    again = (SlowAgain(3, 0.5, 0.5), SlowAgain(4, 0.5, 0.001))
    stacks = Stacks({Line("a.py", 1, "f"): 9}, {Line("a.py", 7, "g"): 3})
    finding = only(judge_time(Evidence(samples=samples, slow_again=again, stacks=stacks), None))
    assert finding.indices == (3,)
    assert "100 % of their time is in a.py:7 in g" in finding.evidence
    assert judge_time(Evidence(samples=samples, slow_again=again[1:]), None).findings == []


def test_a_step_that_this_machine_can_not_feed_is_told() -> None:
    verdict = judge_time(Evidence(samples=(sample(0), sample(1))), workers_needed(1.0, 1.0, 0.1, 2.0))
    assert "can't keep a step of 100 ms fed" in only(verdict).what


# Faults --------------------------------------------------------------------------------------------------------------


def failure(index: int, kind: str = "ValueError") -> Failure:
    return Failure(index, f"{kind}: no", kind, Line("a.py", 3, "read"))


def test_failures_of_one_line_are_one_finding() -> None:
    evidence = Evidence(
        construction=BUILT, samples=(sample(0),), failures=(failure(5), failure(2), failure(7, "OSError"))
    )
    findings = judge_faults(evidence).findings
    assert [one.indices for one in findings] == [(2, 5), (7,)]
    assert "a.py:3 in read" in findings[0].evidence


def test_a_length_that_is_too_long_is_one_finding_without_the_failures_beyond_the_end() -> None:
    evidence = Evidence(
        construction=BUILT,
        samples=(sample(0),),
        failures=(failure(9, "IndexError"), failure(8, "IndexError")),
        first_failing=FirstFailing(8),
    )
    finding = only(judge_faults(evidence))
    assert finding.topic == "length"
    assert "return 8" in finding.remedy


@pytest.mark.parametrize("lengths", [(10, 11, 12), (10, 10, 10)])
def test_a_length_that_changes_is_a_fault(lengths: tuple[int, ...]) -> None:
    other = OtherBuild(9, {}, {}, ())
    evidence = Evidence(construction=replace(BUILT, lengths=lengths), other_build=other)
    assert "length changes" in only(judge_faults(evidence)).what


@pytest.mark.parametrize(
    ("built", "what"),
    [
        (replace(BUILT, error="OSError: no"), "can't be built"),
        (replace(BUILT, lengths=(), length_error="len(dataset) raised TypeError"), "no usable length"),
        (replace(BUILT, lengths=(0, 0, 0)), "is empty"),
    ],
)
def test_a_dataset_that_can_not_be_used_is_a_fault(built: Construction, what: str) -> None:
    assert what in only(judge_faults(Evidence(construction=built))).what


def test_a_process_that_ended_is_a_fault_with_its_sample_and_line() -> None:
    ended = Ended("fetching a sample", 42, "was killed by SIGSEGV", Line("a.py", 3, "read"))
    finding = only(judge_faults(Evidence(ended=(ended,))))
    assert finding.indices == (42,)
    assert "was killed by SIGSEGV at dataset index 42" in finding.what
    assert "a.py:3 in read" in finding.evidence


def test_a_build_that_hangs_may_only_take_long() -> None:
    ended = Ended("building the dataset", None, "made no progress for 60.0 s")
    finding = only(judge_faults(Evidence(ended=(ended,))))
    assert finding.indices == ()
    assert "--stall-seconds" in finding.remedy


def test_side_effects_are_told() -> None:
    habits = Habits(10, 10, "hello", ("os.environ",), (("['x']", 12, 1 << 24),), ("['y']",))
    findings = judge_faults(Evidence(habits=habits)).findings
    assert [one.severity for one in findings] == [Severity.WARNING] * 3 + [Severity.NOTE]
    texts = " ".join(one.evidence for one in findings)
    assert all(part in texts for part in ("os.environ", "hello", "sample['x']", "sample['y']"))


def test_a_line_now_and_then_is_not_printing() -> None:
    assert judge_faults(Evidence(habits=Habits(10, 2, "hello", (), (), ()))).findings == []


# The whole -----------------------------------------------------------------------------------------------------------


def test_a_diagnosis_of_nothing_has_no_numbers() -> None:
    diagnosis = Diagnosis.of(Settings("a:b"), Evidence(), 2.0)
    assert diagnosis.timing is None
    assert diagnosis.exit_code == 0
    assert str(diagnosis) == "a:b"


def test_a_diagnosis_is_text_and_json() -> None:
    evidence = Evidence(
        construction=BUILT,
        samples=tuple(sample(index) for index in range(10)),
        failures=(failure(3),),
        batches=Batches(4, (0.1, 0.2), (0.01, 0.01), 48),
        stacks=Stacks({Line("a.py", 1, "f"): 3, Line("a.py", 2, "f"): 1}, {}),
    )
    diagnosis = Diagnosis.of(Settings("a:b", step_s=0.1, batch_size=4), evidence, 2.0)
    assert diagnosis.exit_code == 1
    text = str(diagnosis)
    assert "FAULT (faults)" in text
    assert "75 %  a.py:1 in f" in text
    loaded = json.loads(diagnosis.to_json())
    assert loaded["findings"][0]["indices"] == [3]
    assert loaded["lines"][0] == {"line": {"file": "a.py", "number": 1, "function": "f"}, "share": 0.75, "num_hits": 3}
    assert loaded["workers"]["num_cores"] == 2.0
    assert loaded["timing"]["samples_per_s"] == pytest.approx(1000)


def test_findings_are_sorted_worst_first_and_keep_their_order_otherwise() -> None:
    findings = [Finding(severity, "t", str(number), "", "") for number, severity in enumerate([*Severity][::-1] * 2)]
    assert [one.what for one in sorted_findings(findings)] == ["2", "5", "1", "4", "0", "3"]


@given(st.lists(st.integers(), max_size=30))
def test_long_lists_are_cut(items: list[int]) -> None:
    text = quoted(items)
    assert text.count(",") <= 7
    assert ("more" in text) == (len(items) > 8)


@pytest.mark.parametrize("options", [{"seconds": 0}, {"batch_size": 0}, {"step_s": -1.0}, {"stall_s": 0}])
def test_settings_that_make_no_sense_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Settings("a:b", **options)  # type: ignore[arg-type]
