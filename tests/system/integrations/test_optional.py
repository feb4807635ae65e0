from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.helpers import run_script


@pytest.mark.parametrize(
    ("module", "missing", "hint"),
    [
        ("lightning", ("lightning", "pytorch_lightning"), "pip install lightning"),
        ("huggingface", ("transformers",), "pip install 'transformers"),
        ("accelerate", ("accelerate",), "pip install accelerate"),
        ("timm", ("timm",), "pip install timm"),
    ],
)
def test_a_missing_framework_is_an_import_error_that_says_what_to_install(
    module: str, missing: tuple[str, ...], hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"swift_loader.integrations.{module}", raising=False)
    for name in missing:
        for imported in [other for other in sys.modules if other.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, imported)  # Python doesn't ask for a parent of what it has
        monkeypatch.setitem(sys.modules, name, None)  # so that importing it fails

    with pytest.raises(ImportError, match=hint):
        import_module(f"swift_loader.integrations.{module}")


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_the_callbacks_are_of_the_package_that_the_program_imports(package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    code = f"""
import {package} as pl
from swift_loader.integrations.lightning import LoaderStateCallback, OnExceptionCheckpoint
assert issubclass(LoaderStateCallback, pl.Callback) and OnExceptionCheckpoint is pl.callbacks.OnExceptionCheckpoint
"""
    run_script(code, folder=tmp_path, options=["-W", "ignore"])
