"""Modules whose source changes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from swift_loader.worker.source_stamps import SourceStamps


def test_a_module_whose_source_changes_makes_them_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "stamped_module.py"
    source.write_text("A = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    stamps = SourceStamps()
    importlib.import_module("stamped_module")
    monkeypatch.delitem(sys.modules, "stamped_module", raising=False)
    importlib.import_module("stamped_module")
    stamps.take()
    assert not stamps.are_stale()
    source.write_text("A = 10\n")
    assert stamps.are_stale()
    source.unlink()
    assert stamps.are_stale()
    del sys.modules["stamped_module"]


def test_what_was_imported_before_the_first_look_counts_too() -> None:
    stamps = SourceStamps()
    assert not stamps.are_stale()
    stamps.take()
    assert "stamps of 0" not in repr(stamps).lower()
    assert not stamps.are_stale()
