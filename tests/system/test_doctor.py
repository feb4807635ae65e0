"""The doctor raises no false alarm over real kinds of datasets, and finds each planted fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swift_loader.__main__ import main
from swift_loader.doctor import Diagnosis, Finding, Settings, Severity, diagnose
from tests.support import doctor_datasets as planted
from tests.support.doctor_datasets import FOLDER
from tests.support.helpers import exhaustive, set_environ
from tests.support.pages import ROOT

pytestmark = pytest.mark.timeout(240)

SECONDS = 1.0


def target(name: str) -> str:
    return f"{planted.__name__}:{name}"


def diagnosed(name: str, **options: Any) -> Diagnosis:
    return diagnose(Settings(target(name), **{"seconds": SECONDS, "stall_s": 60.0, **options}))


def found(diagnosis: Diagnosis, topic: str) -> Finding:
    findings = [finding for finding in diagnosis.findings if finding.topic == topic]
    assert findings, f"nothing about {topic}:\n{diagnosis}"
    return findings[0]


def alarms(diagnosis: Diagnosis) -> list[str]:
    """Return the topics of faults and warnings, without slow samples: on a busy machine these may be true."""
    return [one.topic for one in diagnosis.findings if one.topic != "time"]


@pytest.mark.slow
def test_several_faults_are_found_at_once_and_sorted_worst_first() -> None:
    diagnosis = diagnosed("SeveralFaults", seconds=5.0)
    assert [one.severity for one in diagnosis.findings] == sorted(
        (one.severity for one in diagnosis.findings), key=list(Severity).index
    )
    assert planted.FAILING in found(diagnosis, "faults").indices
    assert "dataset.rng" in found(diagnosis, "randomness").evidence
    assert "noise" in found(diagnosis, "leaves").evidence
    assert diagnosis.exit_code == 1


def test_a_target_that_does_not_exist_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", target("Nowhere")]) == 2
    assert "has no 'Nowhere'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "topic", "evidence"),
    [
        ("Unbuildable", "faults", "no index file"),
        ("ExitingConstructor", "faults", "building the dataset"),
        ("Empty", "length", "is 0"),
    ],
)
def test_a_dataset_that_can_not_be_used_is_a_fault(name: str, topic: str, evidence: str) -> None:
    diagnosis = diagnosed(name)
    assert evidence in found(diagnosis, topic).evidence
    assert diagnosis.exit_code == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Sound", *map(exhaustive, ["Bulk", "images"])])
def test_there_is_no_alarm_over_a_sound_dataset(name: str, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "images":
        pytest.importorskip("timm")
        set_environ(monkeypatch, FOLDER, str(photos))
    diagnosis = diagnosed(name)
    assert alarms(diagnosis) == [], str(diagnosis)
    assert diagnosis.exit_code == 0
    assert diagnosis.timing is not None
    assert diagnosis.collate_s is not None
    assert any("stopped and resumed" in line for line in diagnosis.healthy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("Unkeyed", "dataset.rng"),
        ("UnkeyedByTheSystem", "generator made without a seed"),
        ("Counting", "no random source was seen"),
    ],
)
def test_samples_that_differ_are_named_with_their_cause(name: str, cause: str) -> None:
    diagnosis = diagnosed(name)
    finding = found(diagnosis, "randomness")
    assert finding.severity is Severity.FAULT
    assert cause in finding.evidence
    assert finding.indices
    assert found(diagnosis, "resume").severity is Severity.FAULT
    if name.startswith("Unkeyed"):
        assert "sample_rng()" in finding.remedy
    assert ("they may draw the same" in finding.what) == (name == "Unkeyed")


@pytest.mark.slow
def test_a_dataset_that_each_process_builds_anew_at_random_does_not_resume() -> None:
    finding = found(diagnosed("RandomConstructor"), "resume")
    assert finding.severity is Severity.FAULT
    assert "differs at dataset index" in finding.evidence
    assert "fixed seed" in finding.remedy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "topic", "evidence", "remedy", "indices"),
    [
        ("ManyStrings", "memory", "a list of 1,000,000 Python objects", "NumPy array", ()),
        ("Ragged", "leaves", "there is (5,) in sample", "Pad or crop", ()),
        ("Failing", "faults", "record 77 is broken", "on_error='skip'", (planted.FAILING,)),
        ("TooLong", "length", "IndexError", "return 290", (planted.NUM_REAL, planted.NUM_SAMPLES - 1)),
        ("Growing", "memory", "dataset.cache", "Bound the cache", ()),
        ("Reseeding", "randomness", "the same in epochs 0 and 1", "Leave the seeding", ()),
    ],
)
def test_a_planted_fault_is_found_with_its_remedy(
    name: str, topic: str, evidence: str, remedy: str, indices: tuple[int, ...]
) -> None:
    finding = found(diagnosed(name), topic)
    assert evidence in finding.evidence
    assert remedy in finding.remedy
    assert finding.indices == indices


@pytest.mark.slow
def test_a_loader_s_collate_function_and_batch_size_are_examined() -> None:
    diagnosis = diagnosed("loader_with_a_slow_collate_function")
    assert diagnosis.batch_size == 3
    assert diagnosis.collate_s is not None
    assert diagnosis.collate_s >= planted.SLOW_S
    assert "to collate a batch of 3" in str(diagnosis)


@pytest.mark.slow
def test_slow_samples_are_named_with_the_line_that_takes_their_time() -> None:
    diagnosis = diagnosed("SlowLine", seconds=3.0)
    finding = found(diagnosis, "time")
    assert finding.indices
    assert {index % planted.SLOW_EVERY for index in finding.indices} == {1}
    lines = Path(planted.__file__).read_text(encoding="utf-8").splitlines()
    number = next(number for number, line in enumerate(lines, 1) if "# the slow line" in line)
    assert f"doctor_datasets.py:{number} in __getitem__" in finding.evidence
    assert diagnosis.lines[0].line.number == number


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how", "evidence"),
    [("Crashing", "was killed by SIGSEGV", "doctor_datasets.py"), ("Exiting", "with exit code 3", "fetching a sample")],
)
def test_a_sample_that_ends_the_process_is_named(name: str, how: str, evidence: str) -> None:
    diagnosis = diagnosed(name, seconds=60.0)  # a busy machine's time would end before the sample
    finding = found(diagnosis, "faults")
    assert how in finding.what
    assert finding.indices == (planted.FAILING,)
    assert evidence in finding.evidence


@pytest.mark.slow
def test_a_sample_that_hangs_is_named() -> None:
    finding = found(diagnosed("Hanging", seconds=60.0, stall_s=6.0), "faults")
    assert "no progress" in finding.what
    assert finding.indices == (planted.FAILING,)
    assert "doctor_datasets.py" in finding.evidence


@pytest.mark.slow
def test_the_command_prints_json() -> None:
    command = [sys.executable, "-m", "swift_loader", "doctor", target("Sound"), "--json", "--seconds=1"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    diagnosis = json.loads(done.stdout)
    assert diagnosis["num_samples"] == planted.NUM_SAMPLES
    assert diagnosis["timing"]["p50_s"] <= diagnosis["timing"]["max_s"]


def test_it_says_that_too_few_samples_are_not_resumed() -> None:
    finding = found(diagnosed("Three"), "resume")
    assert (finding.severity, finding.what[:7]) == (Severity.WARNING, "Whether")
