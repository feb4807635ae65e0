"""How interpreters are started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from swift_loader.executors.process.launch import Conditions, Launch


@pytest.fixture
def launch() -> Launch:
    launch = Launch.of_this_process()
    launch.close()
    return launch


def test_an_empty_entry_of_the_path_is_spelled_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/elsewhere", Path("/ignored")])
    found = Launch.of_this_process()
    found.close()
    assert found.path[:2] == (str(tmp_path), "/elsewhere")
    assert "/ignored" not in found.path


def test_what_changes_afterwards_makes_it_stale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launch = Launch.of_this_process()
    try:
        assert launch.is_current()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/by/torch")
        assert launch.is_current()
        monkeypatch.setenv("MINE", "1")
        assert not launch.is_current()
        monkeypatch.delenv("MINE")
        monkeypatch.chdir(tmp_path)
        assert not launch.is_current()
    finally:
        launch.close()


def test_the_umask_is_looked_up_and_not_changed(launch: Launch) -> None:
    mask = os.umask(0o022)
    os.umask(mask)
    assert launch.umask == mask


def test_a_place_changes_with_what_an_interpreter_has_from_its_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def conditions() -> Conditions:
        launch = Launch.of_this_process()
        try:
            return launch.conditions()
        finally:
            launch.close()

    first = conditions()
    assert conditions() == first
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/by/torch")
    assert conditions() == first
    monkeypatch.setenv("MINE", "1")
    second = conditions()
    monkeypatch.chdir(tmp_path)
    third = conditions()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert len({first, second, third, conditions()}) == 4
