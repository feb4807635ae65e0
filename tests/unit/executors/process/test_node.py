from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from swift_loader.executors.process.launch import Conditions, Launch
from swift_loader.executors.process.node import Meetings, is_alone, meeting_name, run_variables
from swift_loader.transport.payload import Environment, PayloadLayout, write_payload

RUN = {"MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}


@pytest.fixture
def conditions() -> Iterator[Conditions]:
    launch = Launch.of_this_process()
    yield launch.conditions()
    launch.close()


@pytest.fixture
def payload() -> Iterator[tuple[PayloadLayout, int]]:
    layout, descriptor, _ = write_payload([1, 2, 3], Environment(["script"]))
    yield layout, descriptor
    os.close(descriptor)


def with_variable(conditions: Conditions, name: str, value: str) -> Conditions:
    return replace(conditions, environ=conditions.environ | {(name, value)})


@pytest.mark.parametrize(
    "environ",
    [
        {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"},
        {"SLURM_LOCALID": "0"},
        {"LOCAL_RANK": "1"},
    ],
    ids=str,
)
def test_a_launcher_that_may_have_started_more_ranks_here_makes_no_rank_alone(environ: dict[str, str]) -> None:
    assert is_alone(environ) == ""


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, r"one rank on this machine \(LOCAL_WORLD_SIZE=1\)"),
        ({}, "no variable of a launcher"),
        ({"LOCAL_RANK": "", "RANK": "3"}, "no variable of a launcher"),
    ],
)
def test_a_rank_without_others_on_its_machine_is_alone(environ: dict[str, str], reason: str) -> None:
    assert re.search(reason, is_alone(environ))


def test_equal_ranks_compute_one_name(conditions: Conditions, payload: tuple[PayloadLayout, int]) -> None:
    other = with_variable(with_variable(conditions, "RANK", "1"), "CUDA_VISIBLE_DEVICES", "3")
    other = replace(other, affinity=frozenset({7}), stdout=(1, 1))
    name = meeting_name(conditions, payload, RUN)
    assert meeting_name(other, payload, dict(reversed(RUN.items()))) == name
    assert name.startswith(b"\0swift_loader-")
    assert len(name) < 90  # sun_path has 108 bytes, and a number is appended


@pytest.mark.parametrize(
    "change",
    [
        {"umask": 0o777},
        {"directory": (1, 2)},
        {"path": ("elsewhere",)},
        {"command": ("python", "-O")},
        {"environ": frozenset({("DATA", "elsewhere")})},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_environment_gives_another_name(
    conditions: Conditions, payload: tuple[PayloadLayout, int], change: dict[str, Any]
) -> None:
    assert meeting_name(replace(conditions, **change), payload, RUN) != meeting_name(conditions, payload, RUN)


def test_another_run_or_payload_gives_another_name(conditions: Conditions, payload: tuple[PayloadLayout, int]) -> None:
    layout, descriptor, _ = write_payload([1, 2, 4], Environment(["script"]))
    names = {
        meeting_name(conditions, payload, RUN),
        meeting_name(conditions, payload, {**RUN, "MASTER_PORT": "29501"}),
        meeting_name(conditions, (layout, descriptor), RUN),
    }
    os.close(descriptor)
    assert len(names) == 3


def test_what_names_the_run_is_taken_from_the_launcher() -> None:
    environ = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "SLURM_STEP_ID": "0", "RANK": "1", "HOME": "/root"}
    assert run_variables(environ) == {"MASTER_ADDR": "a", "MASTER_PORT": "1", "SLURM_STEP_ID": "0"}


def test_later_loaders_of_a_process_meet_elsewhere() -> None:
    meetings = Meetings()
    assert [meetings.number_of(b"a"), meetings.number_of(b"b"), meetings.number_of(b"a")] == [b"-1", b"-1", b"-2"]
    meetings.forget()
    assert meetings.number_of(b"a") == b"-1"
