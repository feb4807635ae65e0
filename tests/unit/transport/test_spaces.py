from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from swift_loader.transport import names
from swift_loader.transport.spaces import Spaces, is_made, names_of, variables_beside


@pytest.fixture(name="made")
def _made(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Return a module that the script has made: it is in `sys.modules`, but no finder finds it."""
    module = types.ModuleType("made_by_a_script")
    exec("def call(): return 3", vars(module))
    monkeypatch.setitem(sys.modules, "made_by_a_script", module)
    return module


def test_the_script_is_one_set_even_if_multiprocessing_copied_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    main = vars(sys.modules["__main__"])
    monkeypatch.setitem(main, "__name__", "__mp_main__")
    spaces = Spaces(has_run_script=False)
    space = spaces.of(main)
    assert spaces.of({"__name__": "__mp_main__"}) is space
    assert space.is_script
    assert not space.is_module


def test_the_script_becomes_main_only_where_it_has_not_run() -> None:
    main = vars(sys.modules["__main__"])
    assert Spaces(has_run_script=False).of(main).is_script
    assert not Spaces(has_run_script=True).of(main).is_script


def test_a_modules_variables_are_a_set_of_their_own() -> None:
    spaces = Spaces(has_run_script=False)
    space = spaces.of(vars(names))
    assert (space.name, space.is_module, space.is_script, space.made) == (names.__name__, True, False, None)
    assert spaces.of(vars(names)) is space
    assert spaces.of(dict(vars(names))) is not space
    assert not spaces.of(dict(vars(names))).is_module


def test_a_module_that_the_script_made_is_known_as_such(made: types.ModuleType) -> None:
    assert is_made("made_by_a_script")
    assert is_made("made_by_a_script.part")
    assert not is_made("json.decoder")
    assert Spaces(has_run_script=False).of(vars(made)).made is made


def test_the_variables_beside_code_are_those_of_a_module_that_cannot_be_imported(made: types.ModuleType) -> None:
    call: Callable[[], Any] = made.call
    assert variables_beside(call) is vars(made)
    assert variables_beside(names.used_globals) is None
    call.__module__ = "__mp_main__"
    assert variables_beside(call) is vars(sys.modules["__main__"])
    call.__module__ = "of_no_module"
    assert variables_beside(call) is None


def test_the_variables_of_the_import_system_are_basics_or_left_out() -> None:
    variables = {"__name__": "m", "__file__": "m.py", "__spec__": None, "x": 1, "y": 2}
    assert Spaces(has_run_script=True).of(variables).basics == {"__name__": "m", "__file__": "m.py"}
    assert names_of(variables) == ["x", "y"]
