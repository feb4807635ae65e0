"""A target `package.module:name`: what it names, and what is said if it can't be had."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_loader.__main__ import CommandError, find_target, made_by, main

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
