from __future__ import annotations

import sys
from importlib import import_module

import pytest


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
