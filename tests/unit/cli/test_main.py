"""The command line: which subcommand runs, and what its exit code is."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

import swift_loader
from swift_loader.cli import main as cli
from swift_loader.cli.errors import CommandError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Make this module a subcommand."""
    parser.add_argument("number", type=int)


def run(arguments: argparse.Namespace) -> int:
    """Return the number, or fail as a subcommand does."""
    if arguments.number < 0:
        raise CommandError("the number is negative")
    return int(arguments.number)


@pytest.fixture(autouse=True)
def subcommands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subcommands that tests can run: this module, and one whose module is missing."""
    table = {"number": (__name__, "return a number"), "absent": ("swift_loader_absent", "isn't there")}
    monkeypatch.setattr(cli, "SUBCOMMANDS", table)


def test_the_exit_code_is_that_of_the_subcommand() -> None:
    assert cli.main(["number", "7"]) == 7


def test_a_command_error_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["number", "--", "-1"]) == 2
    assert capsys.readouterr().err == "swift-loader: error: the number is negative\n"


def test_a_subcommand_whose_module_is_missing_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["absent"]) == 2
    assert "absent needs the module 'swift_loader_absent'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["unknown"], ["number"], ["number", "seven"]])
def test_a_wrong_command_line_is_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "usage: swift-loader" in capsys.readouterr().err


def test_help_lists_all_subcommands_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    assert "isn't there" in capsys.readouterr().out


def test_the_package_runs_as_a_module() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "swift_loader", "--version"], capture_output=True, text=True, check=True
    )
    assert ran.stdout == f"swift_loader {swift_loader.__version__}\n"
