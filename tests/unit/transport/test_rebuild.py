"""Rebuilding code: nothing that created it runs a second time."""

from __future__ import annotations

import sys
import types
from abc import ABCMeta
from typing import Any

import pytest

from swift_loader.transport import rebuild
from tests.support.forked import run_in_fork


class Loud(type):
    """A metaclass that must not run again."""

    def __new__(cls, *args: Any) -> Any:
        pytest.fail("the metaclass ran")

    def __setattr__(cls, name: str, value: object) -> None:
        pytest.fail("the metaclass's __setattr__ ran")


class Hooked:
    def __init_subclass__(cls) -> None:
        if not hasattr(cls, "value"):
            raise TypeError("the class isn't filled yet")


def test_a_class_is_made_and_filled_without_its_metaclass() -> None:
    made = rebuild.new_class(Loud, "Made", (), {"__module__": "m", "__qualname__": "Outer.Made"}, False)
    rebuild.fill_class(made, {"value": 3})
    assert (type(made), made.__qualname__, made.__module__) == (Loud, "Outer.Made", "m")
    assert vars(made)["value"] == 3


@pytest.mark.parametrize("has_abstract", [False, True])
def test_a_class_is_made_without_the_hook_of_its_base(has_abstract: bool) -> None:
    made = rebuild.new_class(ABCMeta if has_abstract else type, "Made", (Hooked,), {"__module__": "m"}, has_abstract)
    assert made.__bases__ == (Hooked,)
    assert hasattr(made, "_abc_impl") is has_abstract


def test_the_registered_classes_of_an_abstract_one_are_known() -> None:
    made = rebuild.new_class(ABCMeta, "Made", (), {"__module__": "m"}, True)
    rebuild.fill_class(made, {"_abc_registry": [int]})
    assert issubclass(int, made)


def test_a_function_is_filled_after_it_is_made() -> None:
    def source(x: int, y: int = 0) -> int:
        return x + y

    made = rebuild.new_function(source.__code__, {}, ("f", "g.f", None), "doc", None)
    rebuild.fill_function(made, {"__defaults__": (5,)}, {"mark": 1})
    assert (made(1), made.__name__, made.__qualname__, made.__doc__) == (6, "f", "g.f", "doc")
    assert getattr(made, "__module__", "") is None
    assert vars(made) == {"mark": 1}


def test_a_variable_that_is_set_already_stays_unless_it_is_a_stand_in() -> None:
    variables = {"x": 1}
    rebuild.fill_namespace(variables, "x", 2)
    rebuild.fill_namespace(variables, "y", 2)
    assert variables == {"x": 1, "y": 2}
    rebuild.set_variable(variables, "x", 3)
    assert variables["x"] == 3


@pytest.mark.parametrize("container", [[9], {9: 9}, {9}])
def test_a_container_has_the_content_only(container: Any) -> None:
    content: Any = {1: 2} if isinstance(container, dict) else [1]
    rebuild.refill(container, content)
    assert container == type(container)(content)


def test_a_cell_is_empty_until_it_is_filled() -> None:
    cell = rebuild.new_cell()
    with pytest.raises(ValueError, match="empty"):
        cell.cell_contents  # noqa: B018 - reading it is the test
    rebuild.fill_cell(cell, 3)
    assert cell.cell_contents == 3


def test_modules_that_cannot_be_imported_are_passed_over() -> None:
    rebuild.import_modules(["no_such_module", "json.tool"])
    assert "json.tool" in sys.modules


def test_the_scripts_variables_become_those_of_main() -> None:
    def check() -> None:
        variables = rebuild.new_namespace("script", {"__file__": "train.py"}, is_script=True, is_module=False)
        variables["x"] = 3
        main: Any = sys.modules["__main__"]
        assert main is sys.modules["script"]
        assert main.x == 3
        assert variables["__file__"] == "train.py"
        assert not hasattr(main, "__file__")

    assert run_in_fork(check) == 0


def test_functions_of_an_imported_module_use_its_own_variables() -> None:
    variables = rebuild.new_namespace(__name__, {}, is_script=False, is_module=True)
    assert variables is globals()
    other = rebuild.new_namespace("not_imported", {"__name__": "n"}, is_script=False, is_module=True)
    assert other["__name__"] == "n"
    assert "__builtins__" in other


def test_a_module_that_cannot_be_imported_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "made_here", types.ModuleType("made_here"))
    made = rebuild.new_module("made_here")
    assert made is sys.modules["made_here"]
    made.__dict__["__file__"] = "kept"
    variables = rebuild.namespace_of(made, {"__file__": "new", "__path__": []})
    assert (variables["__file__"], variables["__path__"]) == ("kept", [])
