"""A state in a file: where it is found, and what is said if it isn't."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_loader.replay import read_state

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
        ({"model": {"weight": torch.ones(3)}, "loader": STATE}, None),
        ({"model": {"weight": torch.ones(3)}, "loader": STATE}, "loader"),
        ({"loops": {"fit": {"epoch.state": [STATE]}}}, None),
        ({"loops": {"fit": {"epoch.state": [STATE]}}}, "loops.fit.epoch.state.0"),
        ({"train": STATE, "val": {**STATE, "seed": 4}}, "train"),
    ],
)
def test_a_state_is_found_wherever_it_is(tmp_path: Path, content: Any, key: str | None) -> None:
    assert read_state(saved(tmp_path, content), key) == STATE


def test_a_state_may_be_in_a_json_file(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"loader": STATE}))
    assert read_state(tmp_path / "state.json") == STATE


@pytest.mark.parametrize(
    ("content", "key", "message"),
    [
        ({"model": 1, "step": 2}, None, "has no state of a SwiftLoader; it has the keys 'model', 'step'"),
        ({"a": STATE, "b": [STATE]}, None, r"has several states, at 'a', 'b\.0'; give the key"),
        ({"loader": STATE}, "lader", "has no 'lader'; it has the keys 'loader'"),
        ({"loader": 5}, "loader", "is a int; a state is a dict"),
        (3, None, "it has a int"),
    ],
)
def test_a_file_without_the_state_says_what_it_has(tmp_path: Path, content: Any, key: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_state(saved(tmp_path, content), key)


def test_objects_are_only_loaded_on_request(tmp_path: Path) -> None:
    path = saved(tmp_path, {"own": Own(), "loader": STATE})
    with pytest.raises(ValueError, match="Loading them can run code"):
        read_state(path)
    assert read_state(path, unpickle=True) == STATE


@pytest.mark.parametrize("name", ["text.pt", "text.json"])
def test_another_file_is_a_value_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("nothing of that kind")
    with pytest.raises(ValueError, match=r"text\.pt isn't a file of torch\.save|Expecting value"):
        read_state(tmp_path / name)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_state(tmp_path / "absent.pt")
