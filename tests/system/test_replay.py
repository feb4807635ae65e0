"""Batches of a past run, rebuilt: the bytes are those that the loop got."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swift_loader import DataLoader, StateMismatch, SwiftLoader, SwiftLoaderWarning
from swift_loader.__main__ import main
from swift_loader.replay import Rebuilt, checksum, read_state, rebuild
from tests.support.datasets import Counting
from tests.support.helpers import ROOT, START_METHOD
from tests.support.past_runs import (
    BATCH_SIZE,
    FAULTY,
    NUM_SAMPLES,
    WORLD_SIZE,
    Augmented,
    collate,
    make_dataset,
    make_loader,
    make_small,
)

DATASET: Any = Counting()
TARGET = "tests.support.past_runs:make_loader"
NUM_STEPS = -(-NUM_SAMPLES // (BATCH_SIZE * WORLD_SIZE))


@dataclass(frozen=True)
class Seen:
    checksum: str
    indices: list[int]
    num_padding: int


@dataclass(frozen=True)
class PastRun:
    batches: dict[tuple[int, int, int], Seen]
    """By epoch, step and rank."""
    states: dict[tuple[int, int], dict[str, Any]]
    """Before each step: by epoch and step."""


def matches(seen: Seen, rebuilt: Rebuilt) -> bool:
    return seen == Seen(checksum(rebuilt.batch), rebuilt.indices.tolist(), rebuilt.num_padding)


def seen_by(loader: SwiftLoader, batch: Any) -> Seen:
    return Seen(checksum(batch), loader.batch_indices.tolist(), loader.num_padding)


@pytest.fixture(scope="module")
def past() -> PastRun:
    """Two epochs on two ranks, with worker processes."""
    batches: dict[tuple[int, int, int], Seen] = {}
    states: dict[tuple[int, int], dict[str, Any]] = {}
    for rank in range(WORLD_SIZE):
        with make_loader(2, start_method=START_METHOD) as loader:
            loader.start(rank)
            for epoch in range(2):
                states[epoch, 0] = loader.state_dict()
                for step, batch in enumerate(loader):
                    batches[epoch, step, rank] = seen_by(loader, batch)
                    states[epoch, step + 1] = loader.state_dict()
    assert len(batches) == 2 * NUM_STEPS * WORLD_SIZE
    return PastRun(batches, states)


def test_a_hundred_random_batches_are_those_of_the_run(past: PastRun) -> None:
    drawn = random.Random(3)
    generators = pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))
    for epoch, step, rank in drawn.sample(sorted(past.batches), 100):
        state = past.states[drawn.choice(sorted(past.states))]
        rebuilt = rebuild(make_loader, state, step, epoch=epoch, rank=rank)
        assert matches(past.batches[epoch, step, rank], rebuilt), (epoch, step, rank)
        assert (rebuilt.epoch, rebuilt.step, rebuilt.rank, rebuilt.world_size) == (epoch, step, rank, WORLD_SIZE)
    assert generators == pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))


@pytest.mark.parametrize("step", [0, 1, NUM_STEPS - 1])
@pytest.mark.parametrize("epoch", [0, 1])
def test_the_default_is_the_last_batch_before_the_state(past: PastRun, epoch: int, step: int) -> None:
    rebuilt = rebuild(make_loader, past.states[epoch, step + 1], rank=1)
    assert (rebuilt.epoch, rebuilt.step) == (epoch, step)
    assert matches(past.batches[epoch, step, 1], rebuilt)


@pytest.mark.parametrize("source", [Augmented, make_dataset, make_loader(), make_loader])
def test_the_source_is_a_class_a_function_or_a_loader(past: PastRun, source: Any) -> None:
    rebuilt = rebuild(source, past.states[0, 3], 2, batch_size=BATCH_SIZE, world_size=WORLD_SIZE)
    seen = past.batches[0, 2, 0]
    assert rebuilt.indices.tolist() == seen.indices
    if source is make_loader or isinstance(source, SwiftLoader):
        assert matches(seen, rebuilt)


def test_the_source_may_be_a_dataset() -> None:
    with SwiftLoader(dataset=Counting(50), batch_size=8, worker_per_consumer=0, seed=1) as loader:
        batches = [checksum(batch) for batch in loader]
        rebuilt = [rebuild(Counting(50), loader.state_dict(), step, batch_size=8) for step in range(7)]
    assert [checksum(one.batch) for one in rebuilt] == batches


def test_a_batch_of_an_epoch_that_was_resumed_with_another_batch_size_is_named_by_its_position(past: PastRun) -> None:
    state = past.states[0, 5]
    loader = SwiftLoader(Augmented, batch_size=4, worker_per_consumer=0, collate_fn=collate)
    with loader:
        loader.load_state_dict(state)
        batches = iter(loader)
        for _ in range(6):
            next(batches)
        before, batch, state = loader.state_dict(), next(batches), loader.state_dict()
        rebuilt = rebuild(loader, state, position=before["position"])
        assert matches(seen_by(loader, batch), rebuilt)
        assert (rebuilt.step, rebuilt.position) == (None, 5 * 14 + 6 * 4)
        with pytest.raises(ValueError, match="no step of 4 samples on one rank ends at the state's position 98"):
            rebuild(loader, state)


def test_the_last_batch_of_an_epoch_that_skips_and_was_resumed_with_another_batch_size_is_the_one_or_refused() -> None:
    def make(batch_size: int) -> SwiftLoader:
        return SwiftLoader(Augmented, batch_size=batch_size, worker_per_consumer=0, collate_fn=collate, seed=0)

    with make(1) as loader:
        loader.skip([6, 7, 25])
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = loader.state_dict()
    with make(8) as loader:
        loader.load_state_dict(state)
        num_rebuilt = num_refused = 0
        for batch, _ in zip(loader, range(10), strict=False):
            try:
                rebuilt = rebuild(loader, loader.state_dict())
            except ValueError as error:
                assert "ends at the state's position" in str(error)  # noqa: PT017 - not each batch has an error
                num_refused += 1
            else:
                assert matches(seen_by(loader, batch), rebuilt)
                num_rebuilt += 1
    assert (num_rebuilt, num_refused) == (7, 3)


def test_a_run_that_skips_is_rebuilt_around_the_skips_and_in_them(past: PastRun) -> None:
    seen = []
    with make_loader() as loader:
        loader.skip([0, 3, 4])
        loader.start(1)
        for batch in loader:
            seen.append(seen_by(loader, batch))
            if len(seen) == 2:
                early = loader.state_dict()
        state = loader.state_dict()
    steps = [step for step in range(NUM_STEPS) if step not in {0, 3, 4}]
    assert all(matches(one, rebuild(make_loader, state, step, rank=1)) for one, step in zip(seen, steps, strict=True))
    assert matches(past.batches[0, 3, 1], rebuild(make_loader, state, 3, rank=1)), "a skipped step, as it was"
    assert rebuild(make_loader, early, rank=1).step == 2, "the last one that the loop got, not a skipped one"


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"step": NUM_STEPS}, ValueError, f"step {NUM_STEPS} is outside an epoch of {NUM_STEPS} steps, with a batch"),
        ({"step": -1}, ValueError, "step=-1 is too small"),
        ({"step": 1.5}, TypeError, "step=1.5 is a float"),
        ({"step": 1, "position": 2}, ValueError, "both given"),
        ({"step": 1, "rank": 2}, ValueError, "rank=2 is too large; it must be at most 1"),
        ({"step": 1, "world_size": 0}, ValueError, "world_size=0 is too small"),
        ({"step": 1, "batch_size": 0}, ValueError, "batch_size=0 is too small"),
        ({"step": 1, "epoch": -1}, ValueError, "epoch=-1 is too small"),
        ({"epoch": 1}, ValueError, "only in its own epoch"),
        ({"batch_size": 9}, ValueError, "no step of 9 samples on each of 2 ranks ends at the state's position 42"),
        ({"position": NUM_SAMPLES}, ValueError, f"rank 0 has no batch at position {NUM_SAMPLES} of epoch 0"),
        (
            {"source": make_small, "step": 1, "batch_size": 7},
            StateMismatch,
            "num_samples=1000, but the dataset now has num_samples=999",
        ),
        ({"source": lambda: make_loader(nearby_shuffle=3), "step": 1}, StateMismatch, "given nearby_shuffle=3"),
        ({"source": Augmented, "step": 1}, ValueError, "give batch_size"),
        ({"source": 3, "step": 1}, TypeError, "the source is a int"),
        ({"source": lambda: 3, "step": 1}, TypeError, "int without __getitem__"),
        ({"source": lambda: DataLoader(DATASET), "step": 1}, TypeError, "a DataLoader without __getitem__"),
    ],
)
def test_what_cannot_be_rebuilt_says_why(
    past: PastRun, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rebuild(given.pop("source", make_loader), past.states[0, 3], **given)


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(StateMismatch, match="the state is that of a DataLoader"):
        rebuild(make_loader, DataLoader(DATASET).state_dict(), 0)


def test_draws_that_depend_on_the_worker_are_warned_of(past: PastRun) -> None:
    with pytest.warns(SwiftLoaderWarning, match="rng='worker', what samples draw at random depends on the worker"):
        rebuild(lambda: make_loader(rng="worker"), past.states[0, 3], 0)


class Failing(Counting):
    """Sample 3 can't be built."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 3:
            raise LookupError("gone")
        return super().__getitem__(index)


def test_a_failing_sample_raises_its_own_error_or_is_left_out() -> None:
    state = SwiftLoader(dataset=Failing(9), batch_size=9, worker_per_consumer=0, shuffle=False).state_dict()
    with pytest.raises(LookupError, match="gone"):
        rebuild(Failing(9), state, 0, batch_size=9)
    skipping = SwiftLoader(dataset=Failing(9), batch_size=9, worker_per_consumer=0, shuffle=False, on_error="skip")
    rebuilt = rebuild(skipping, state, 0)
    assert rebuilt.indices.tolist() == [0, 1, 2, 4, 5, 6, 7, 8]
    assert [failure.index for failure in rebuilt.failures] == [3]


# The command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(past: PastRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint in the working directory, saved after step 2."""
    monkeypatch.chdir(tmp_path)
    torch.save({"model": torch.ones(3), "loader": past.states[0, 3]}, tmp_path / "checkpoint.pt")
    return tmp_path / "checkpoint.pt"


def test_the_command_writes_the_batch_and_describes_it(
    past: PastRun, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", TARGET, "--state", "checkpoint.pt", "--step", "40", "--epoch", "1", "--rank", "1"]) == 0
    seen = past.batches[1, 40, 1]
    written = torch.load(checkpoint.with_name("batch-epoch1-step40-rank1.pt"), weights_only=False)
    assert checksum(written["batch"]) == seen.checksum
    assert written["indices"] == seen.indices
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "epoch 1, step 40, position 560, rank 1 of 2"
    assert lines[1] == f"dataset indices: {', '.join(map(str, seen.indices))}"
    assert lines[2].startswith("batch['image']: torch.float32 (7, 3, 4, 4), checksum ")
    assert lines[-2:] == [f"checksum of the batch: {seen.checksum}", "written to batch-epoch1-step40-rank1.pt"]


def test_the_command_names_the_samples_that_are_not_finite(
    past: PastRun, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [(step, rank) for (epoch, step, rank), seen in past.batches.items() if not epoch and FAULTY in seen.indices]
    words = ["--step", str(found[0][0]), "--rank", str(found[0][1]), "--out", "bad.pt", "--key", "loader"]
    assert main(["replay", TARGET, "--state", "checkpoint.pt", *words]) == 0
    assert f"  NaN or infinity at dataset indices {FAULTY}" in capsys.readouterr().out.splitlines()
    assert checkpoint.with_name("bad.pt").exists()


def test_the_command_takes_a_json_file_and_a_dataset(past: PastRun, checkpoint: Path) -> None:
    (checkpoint.parent / "state.json").write_text(json.dumps(past.states[0, 3]))
    words = ["--batch-size", str(BATCH_SIZE), "--world-size", str(WORLD_SIZE)]
    assert main(["replay", "tests.support.past_runs:Augmented", "--state", "state.json", *words]) == 0
    written = torch.load(checkpoint.with_name("batch-epoch0-step2-rank0.pt"), weights_only=False)
    assert written["indices"] == past.batches[0, 2, 0].indices


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent:make", "--state", "checkpoint.pt"], "there is no module 'absent'"),
        ([TARGET, "--state", "absent.pt"], "No such file or directory: 'absent.pt'"),
        ([TARGET, "--state", "checkpoint.pt", "--key", "model"], "has no dict 'model'"),
        ([TARGET, "--state", "checkpoint.pt", "--step", "99"], "step 99 is outside an epoch of 72 steps"),
        (["tests.support.past_runs:make_small", "--state", "checkpoint.pt", "--batch-size", "7"], "num_samples=999"),
        (["tests.support.past_runs:fail", "--state", "checkpoint.pt"], "past_runs:fail raised RuntimeError: no disk"),
        ([TARGET, "--state", "checkpoint.pt", "--out", "no/such/folder.pt"], "can't write no/such/folder.pt"),
    ],
)
def test_what_the_command_cannot_do_is_one_line_and_exit_code_2(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["replay", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_the_module_runs_as_a_program(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "swift_loader", "replay", TARGET, "--state", str(checkpoint)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=checkpoint.parent, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("epoch 0, step 2, position 28, rank 0 of 2\n")


# The file of a state --------------------------------------------------------------------------------------------------

STATE = {"version": 1, "seed": 3, "epoch": 0, "position": 8, "shuffle": 1, "nearby_shuffle": 0, "run_length": 1}


class Own:
    """A class that a checkpoint may hold."""


def saved(folder: Path, content: Any) -> Path:
    path = folder / "checkpoint.pt"
    torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (STATE, None),
        ({"loops": {"fit": {"epoch.state": [STATE]}}}, None),
        ({"loops": {"fit": {"epoch.state": [STATE]}}}, "loops.fit.epoch.state.0"),
        ({"train": STATE, "val": {**STATE, "seed": 4}}, "train"),
    ],
)
def test_a_state_is_found_wherever_it_is(tmp_path: Path, content: Any, key: str | None) -> None:
    assert read_state(saved(tmp_path, content), key) == STATE


@pytest.mark.parametrize(
    ("content", "key", "message"),
    [
        ({"model": 1, "step": 2}, None, "has no state of a SwiftLoader; it has the keys 'model', 'step'"),
        ({"a": STATE, "b": [STATE]}, None, r"has several states, at 'a', 'b\.0'; give the key"),
        ({"loader": STATE}, "lader", "has no dict 'lader'; it has the keys 'loader'"),
    ],
)
def test_a_file_without_the_state_says_what_it_has(tmp_path: Path, content: Any, key: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_state(saved(tmp_path, content), key)


def test_objects_are_only_unpickled_on_request(tmp_path: Path) -> None:
    path = saved(tmp_path, {"own": Own(), "loader": STATE})
    with pytest.raises(ValueError, match="Loading them can run code"):
        read_state(path)
    assert read_state(path, unpickle=True) == STATE
