"""A target `package.module:name`: what it names, and what is said if it can't be had. The command `state`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_loader import DataLoader, ShuffleBatchSampler, SwiftLoader
from swift_loader.__main__ import CommandError, find_target, made_by, main
from swift_loader.pipeline import Pipeline
from tests.support.samplers import MAKERS

SOURCE = """
class Data:
    def __getitem__(self, index): return index
    def __len__(self): return 3
    def __call__(self): raise RuntimeError("a dataset isn't called")

class Holder:
    data = Data()

def make(): return Data()
def fail(): raise OSError("no\\nsuch disk")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module in the working directory, which isn't on the import path."""
    (tmp_path / "user_data.py").write_text(SOURCE)
    (tmp_path / "user_broken.py").write_text("import missing_library")
    (tmp_path / "user_syntax.py").write_text("def f(:")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield "user_data"
    for name in [name for name in sys.modules if name.startswith("user_")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["make", "Data", "Holder.data"])
def test_a_function_a_class_and_an_object_give_the_dataset(module: str, name: str) -> None:
    assert type(made_by(f"{module}:{name}")).__name__ == "Data"


def test_the_object_itself_can_be_found_without_a_call(module: str) -> None:
    assert find_target(f"{module}:make").__name__ == "make"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("user_data", "isn't of the form package.module:name"),
        (":make", "isn't of the form package.module:name"),
        ("user_data:", "isn't of the form package.module:name"),
        ("user_data:absent", "'user_data' has no 'absent'"),
        ("user_absent:make", "there is no module 'user_absent'"),
        ("user_data.deeper:make", "user_data.deeper"),
        ("user_broken:make", "importing 'user_broken' raised ModuleNotFoundError: No module named 'missing_library'"),
        ("user_syntax:make", "importing 'user_syntax' raised SyntaxError"),
        ("user_data:fail", r"user_data:fail\(\) raised OSError: no such disk"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(module: str, target: str, message: str) -> None:
    with pytest.raises(CommandError, match=message) as caught:
        made_by(target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["--version"], 0), ([], 2), (["doctr"], 2)])
def test_without_a_subcommand_the_help_or_what_is_wrong_is_shown(words: list[str], code: int) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == code


def saved_states() -> dict[str, Any]:
    """Return a checkpoint that holds a state of each class, at different depths."""
    planned: Any = SwiftLoader(dataset=list(range(100)), batch_size=10, worker_per_consumer=0, seed=5)
    planned.skip([2, 3])
    next(iter(planned))
    planned.exclude(7)
    later = planned.state_dict() | {"epoch": 1}
    planned.load_state_dict(later)
    planned.exclude(range(20, 30))
    planned.load_state_dict(planned.state_dict() | {"epoch": 0})
    torchs: Any = DataLoader(list(range(32)), batch_sampler=ShuffleBatchSampler(32, 4))  # type: ignore[arg-type]
    batches = iter(torchs)
    next(batches)
    pipeline = Pipeline(range(40), seed=6).shuffle(3)
    items = iter(pipeline)
    next(items)
    states = {"loaders": [planned.state_dict(), torchs.state_dict()], "loop": {"data": pipeline.state_dict()}}
    return {"model": torch.nn.Linear(2, 2).state_dict(), "epoch": 1, **states}


def test_the_states_in_a_checkpoint_are_said_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = saved_states()
    torch.save(states, tmp_path / "checkpoint.pt")
    assert main(["state", str(tmp_path / "checkpoint.pt")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("  ")] == [
        "loaders.0: the state of a SwiftLoader",
        "loaders.1: the state of a DataLoader",
        "loop.data: the state of a Pipeline",
    ]
    for line in (
        "  position  after 10 of 100 samples",
        "  skipped   samples 20 to 39 of epoch 0",
        "  excluded  1 row from sample 10 of epoch 0 on: 7; 10 rows from sample 10 of epoch 1 on: 20, 21, 22, 23, "
        "24, 25, 26, 27, …",
        "  position  after 1 batch; batch_size=None",
        "  seed      None",
        "  order     by the sampler's own state",
        "  order     shuffle, buffer of 3",
    ):
        assert line in lines
    (tmp_path / "state.json").write_text(json.dumps(states["loaders"][0]))
    assert main(["state", str(tmp_path / "state.json")]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == lines[1:7]
    two = {"foreign": {"_snapshot": {}, "_iterator_finished": False}, "a": states["loaders"][0]}
    (tmp_path / "two.json").write_text(json.dumps({**two, "a.b": two["a"]}))
    assert main(["state", str(tmp_path / "two.json")]) == 2
    printed = capsys.readouterr()
    assert [line.partition(":")[0] for line in printed.out.splitlines() if not line.startswith("  ")] == ["a", "a.b"]
    assert "error: foreign: the state" in printed.err


@pytest.mark.parametrize("name", MAKERS)
def test_the_state_of_each_sampler_is_said_in_words(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampler = MAKERS[name](2, 1)
    list(islice(sampler, 2))
    torch.save({"model": {"weight": torch.zeros(2)}, "sampler": sampler.state_dict()}, tmp_path / "checkpoint.pt")
    assert main(["state", str(tmp_path / "checkpoint.pt")]) == 0
    head, *facts = capsys.readouterr().out.splitlines()
    assert head.startswith("sampler: the state of a ")
    per_item = 4 if name in ("shuffle batches", "in order", "draws", "strata") else 1
    assert any(re.match(rf"  position  after {4 * per_item} .*", fact) for fact in facts), facts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.json", None, "No such file or directory"),
        ("broken.json", "{", "broken.json isn't JSON"),
        ("broken.pt", "{", "broken.pt isn't a file of torch.save"),
        ("other.json", '{"epoch": 3}', "has no state of a loader"),
        ("deep.json", "[" * 200 + "]" * 200, "are more than 100 containers in each other"),
        ("deeper.json", "[" * 200_000, "deeper.json isn't JSON"),
        ("damaged.pt", "PK\x03\x04", "damaged.pt isn't a file of torch.save"),
        ("foreign.json", '{"data": {"_snapshot": {}, "_iterator_finished": false}}', "data: the state .*version"),
    ],
)
def test_a_file_without_a_state_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    assert main(["state", str(tmp_path / name)]) == 2
    printed = capsys.readouterr()
    assert (printed.out, re.search(message, printed.err) is not None) == ("", True), printed.err
