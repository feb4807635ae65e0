"""What training frameworks need beside the loader, one module per framework. Only that module imports the framework.

Lightning's Trainer and Accelerate also need an answer when they call a loader, though the program imports no module of
these. The loaders ask for it with `ask_framework`.

Fabric needs nothing: it saves and loads any object with `state_dict` and `load_state_dict`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

_HOMES = {"accelerate": "accelerate", "lightning": "lightning", "pytorch_lightning": "lightning"}
"""Packages that may call a loader, and our module for each."""

FRAMEWORKS = frozenset([*_HOMES, "lightning_fabric", "timm", "transformers"])


def ask_framework(question: str, loader: Any) -> Any:
    """Return the answer of the framework that calls a method of a loader. Call it in that method.

    In the framework's module, the function of this name, after an underscore, gets the loader and the caller's frame.
    None: there is no such function, or no framework calls.
    """
    caller = sys._getframe(1).f_back  # noqa: SLF001
    for frame in (caller, caller and caller.f_back):  # Lightning calls through functions of Fabric's
        package = "" if frame is None else str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in _HOMES:
            answer = getattr(import_module(f"{__name__}.{_HOMES[package]}"), f"_{question}", None)
            return None if answer is None else answer(loader, caller)
    return None
