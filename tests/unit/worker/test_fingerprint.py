from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.transport.by_value import Definitions
from swift_loader.transport.reports import Verdict
from swift_loader.worker.fingerprint import (
    Rebuild,
    check_samples,
    check_samples_in_fork,
    chosen_indices,
    judge,
    judge_without_forks,
)
from tests.support import datasets


def look(dataset: Any, **options: Any) -> Any:
    options.setdefault("budget_s", 5.0)
    return check_samples(dataset, chosen_indices(len(dataset)), Definitions(), **options)


@given(num_samples=st.integers(0, 2**62))
def test_the_samples_are_within_the_dataset_few_and_always_the_same(num_samples: int) -> None:
    chosen = chosen_indices(num_samples)
    assert all(0 <= index < num_samples for index in chosen)
    assert len(chosen) == len(set(chosen)) <= 6
    assert bool(chosen) == bool(num_samples)
    assert chosen == chosen_indices(num_samples)


@pytest.mark.parametrize("kind", [datasets.Counting, datasets.Augmenting, datasets.AugmentingWithAll, datasets.Batched])
def test_two_builds_of_a_dataset_look_alike(kind: Any) -> None:
    assert len(look(kind()).checksums) == 6
    assert look(kind()) == look(kind())
    in_fork = check_samples_in_fork(kind(), chosen_indices(100), Definitions())
    assert set(in_fork.checksums) <= set(look(kind()).checksums)
    assert in_fork.draws == look(kind()).draws


def test_another_value_another_dtype_and_another_type_look_different() -> None:
    variants: list[Any] = [1, 2, 1.0, "1", np.int64(1), np.ones(3), np.ones(3, np.float32), np.ones((3, 1)), [1], (1,)]
    looks = [look(datasets.Values([value] * 5)).checksums for value in variants]
    assert len({str(one) for one in looks}) == len(variants)


@pytest.mark.parametrize(("kind", "draws"), [(datasets.Counting, False), (datasets.Augmenting, True)])
def test_it_tells_whether_samples_draw_and_puts_the_generators_back(kind: Any, draws: bool) -> None:
    before = random.getstate(), repr(np.random.get_state())
    assert look(kind()).draws is draws
    assert (random.getstate(), repr(np.random.get_state())) == before


def test_a_sample_that_fails_is_left_out() -> None:
    class Fails(datasets.Counting):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == chosen_indices(100)[1]:
                raise ValueError(index)
            return super().__getitem__(index)

    assert [index for index, _ in look(Fails()).checksums] == [
        index for number, index in enumerate(chosen_indices(100)) if number != 1
    ]


def test_slow_samples_are_looked_at_once() -> None:
    assert len(look(datasets.Slow(seconds=0.02), budget_s=0.005).checksums) == 1


@pytest.mark.parametrize("deed", ["SIGKILL", "exit-3"])
def test_a_fork_that_ends_is_no_harm(deed: str) -> None:
    dataset = datasets.Misbehaving(100, at=chosen_indices(100)[0], deed=deed)
    assert check_samples_in_fork(dataset, chosen_indices(100), Definitions()).checksums == ()


def test_a_fork_that_takes_long_is_not_waited_for_and_not_ended_in_the_midst_of_a_sample(tmp_path: Path) -> None:
    class WritesACache(datasets.Counting):
        def __getitem__(self, index: int) -> dict[str, Any]:
            with (tmp_path / "cache").open("w") as file:
                file.write("half")
                file.flush()
                while not (tmp_path / "go").exists():
                    time.sleep(0.01)
                file.write(" and whole")
            return {"id": index}

    assert check_samples_in_fork(WritesACache(), chosen_indices(100), Definitions()).checksums == ()
    (tmp_path / "go").touch()  # only now: a wait for the fork would never have ended
    os.waitpid(-1, 0)
    assert (tmp_path / "cache").read_text() == "half and whole"


@pytest.mark.parametrize("value", ["<object at {address}>", "/tmp/{name}/x", "worker-{pid}"])
def test_what_differs_between_processes_by_chance_does_not_count(value: str) -> None:
    class Tells(datasets.Counting):
        def __init__(self) -> None:
            super().__init__()
            name = "tmp" + "".join(random.Random().choices("abcdefgh0123_", k=8))
            address = hex(0x7F0000000000 + random.Random().getrandbits(32))
            self.text = value.format(address=address, name=name, pid=os.getpid())

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"id": index, "text": self.text}

    assert look(Tells()) == look(Tells())


class OfAKind(datasets.Counting):
    """Samples that differ for different reasons."""

    def __init__(self, kind: str, path: str = "") -> None:
        super().__init__()
        self.kind, self.path = kind, path
        self.generator = np.random.default_rng()
        self.noise = self.generator.normal()
        self.text = Path(path).read_text() if path else ""
        self.count = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.count += 1
        values: dict[str, Callable[[], Any]] = {
            "built at random": lambda: self.noise,
            "fetched at random": self.generator.normal,
            "counted": lambda: self.count,
            "process": os.getpid,
            "file": lambda: self.text,
        }
        return {"id": index, "value": values[self.kind]()}


@pytest.mark.parametrize("fetch_here", [False, True])
@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        ("built at random", Verdict.RANDOM),
        ("fetched at random", Verdict.UNSTABLE),
        ("process", Verdict.UNSTABLE),
        ("file", Verdict.CHANGED),
    ],
)
def test_it_finds_out_why_samples_differ(kind: str, verdict: Verdict, fetch_here: bool) -> None:
    dataset = OfAKind(kind, __file__)
    reported = look(dataset).checksums
    verdicts = judge(
        dataset, Rebuild(lambda: OfAKind(kind, __file__), 0.0), reported, Definitions(), fetch_here=fetch_here
    )
    assert set(verdicts.values()) == {verdict}
    assert len(verdicts) == len(reported) == 6


def test_offsets_of_open_files_stay_where_they_are() -> None:
    class Reads(datasets.Counting):
        def __init__(self) -> None:
            super().__init__()
            self.file = open(__file__, "rb", buffering=0)

        def __getitem__(self, index: int) -> dict[str, Any]:
            self.file.seek(index)
            return {"byte": self.file.read(1)}

    dataset = Reads()
    with dataset.file:
        reported = look(dataset).checksums
        dataset.file.seek(123)
        judge(dataset, Rebuild(Reads, 0.0), reported, Definitions(), fetch_here=False)
        assert dataset.file.tell() == 123


@pytest.mark.parametrize("deed", ["SIGKILL", "raise"])
def test_a_constructor_that_fails_the_second_time_leaves_the_cause_open(deed: str) -> None:
    dataset = datasets.Counting()
    reported = look(dataset).checksums
    again = Rebuild(lambda: datasets.FailsToBuild(deed), 0.0)
    assert set(judge(dataset, again, reported, Definitions(), fetch_here=True).values()) == {Verdict.UNKNOWN}


def test_without_forks_samples_that_change_from_fetch_to_fetch_are_told_from_others() -> None:
    class Clock(datasets.Counting):
        def __getitem__(self, index: int) -> Any:
            return time.perf_counter_ns() if index == chosen_indices(100)[0] else index

    reported = look(Clock()).checksums
    other = tuple((index, checksum + 1) for index, checksum in reported)
    assert set(judge_without_forks(Clock(), reported[:1], Definitions()).values()) == {Verdict.UNSTABLE}
    assert set(
        judge_without_forks(datasets.Counting(), look(datasets.Counting()).checksums, Definitions()).values()
    ) == {Verdict.UNKNOWN}
    assert set(judge_without_forks(Clock(), other, Definitions()).values()) == {Verdict.UNSTABLE}
