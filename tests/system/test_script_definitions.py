"""What a script defines works with any number of workers, as it does with none."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.helpers import exhaustive_unless, run_script
from tests.support.script_definitions import DEFINITIONS, as_script

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
