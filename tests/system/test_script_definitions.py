"""What a script defines works with any number of workers, as it does with none."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.helpers import HANG_S, exhaustive_unless, run_script
from tests.support.script_definitions import DEFINITIONS, LOST, as_script

QUICK = set(list(DEFINITIONS)[::25])
OPTIONAL = ("PIL", "pydantic")


@pytest.mark.parametrize("name", exhaustive_unless(QUICK, DEFINITIONS))
def test_a_definition_gives_the_same_batches_without_workers_with_a_template_and_with_spawn(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition = DEFINITIONS[name]
    for module in OPTIONAL:
        if module in definition and importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} isn't installed")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    printed = run_script(as_script(definition), folder=tmp_path)
    _, inline, template, spawn = printed.split("way ")
    first = inline.removeprefix("inline\n")
    assert first.count("\n") >= 2
    assert template.removeprefix("template\n") == first
    assert spawn.removeprefix("spawn\n") == first


@pytest.mark.parametrize("name", exhaustive_unless({"an Enum with a constructor of its own", "a C structure"}, LOST))
def test_what_can_not_be_sent_by_value_is_an_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error, definition = LOST[name]
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    (tmp_path / "script.py").write_text(as_script(definition))
    command = [sys.executable, str(tmp_path / "script.py"), "inline", "template"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=tmp_path, check=False)
    assert "way template" in ended.stdout  # without workers it works
    assert re.search(error, ended.stderr), ended.stderr
    assert ended.returncode
