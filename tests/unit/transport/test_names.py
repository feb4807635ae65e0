from __future__ import annotations

import types
from typing import Any

import pytest

from swift_loader.transport.names import Submodules, names_in_hints, used_globals


def code_of(source: str, name: str = "f") -> types.CodeType:
    variables: dict[str, Any] = {}
    exec(compile(source, "<test>", "exec"), variables)
    code: types.CodeType = variables[name].__code__
    return code


@pytest.mark.parametrize(
    ("source", "variables"),
    [
        ("def f(x): return x + OFFSET", ["OFFSET"]),
        ("def f():\n global COUNT\n COUNT = 1", ["COUNT"]),
        ("def f():\n global COUNT\n del COUNT", ["COUNT"]),
        ("def f(): return [g(SCALE) for _ in range(3)]", ["range", "g", "SCALE"]),
        ("def f():\n def inner(): return DEEP\n return inner", ["DEEP"]),
        ("def f():\n class Inner:\n  value = DEEP\n return Inner", ["DEEP"]),
        ("def f(x):\n y = x\n return y", []),
    ],
)
def test_the_globals_of_a_function_and_of_what_it_defines_are_found(source: str, variables: list[str]) -> None:
    found = used_globals(code_of(source)).variables
    assert [name for name in found if not name.startswith("__")] == [*variables] or sorted(
        name for name in found if not name.startswith("__")
    ) == sorted(variables)


@pytest.mark.parametrize(
    ("source", "is_all"),
    [
        ("def f(): return globals()['X']", True),
        ("def f(): return eval('X')", True),
        ("def f(): exec('X')", True),
        ("def f():\n import sys\n return sys.modules[__name__].X", True),
        ("def f():\n import sys\n return sys.modules['__main__'].X", True),
        ("def f():\n import __main__\n return __main__.X", True),
        ("def f():\n import sys\n return sys.modules", False),
        ("def f(): return X", False),
    ],
)
def test_code_that_may_look_up_any_variable_is_recognised(source: str, is_all: bool) -> None:
    assert used_globals(code_of(source)).is_all is is_all


def test_the_names_include_attributes_and_imports() -> None:
    assert {"os", "path", "join"} <= used_globals(code_of("def f():\n import os\n return os.path.join('a')")).names


def test_string_hints_name_globals_and_others_do_not() -> None:
    hints = ["dict[str, Sample]", "list[Sample | Other]", int, "not an expression", "x\0", "'Quoted'"]
    assert [name for name in names_in_hints(hints) if name[0].isupper()] == ["Sample", "Other"]


def test_a_submodule_is_used_once_all_parts_of_its_name_are() -> None:
    submodules = Submodules()
    submodules.add_package("a", ["a", "a.b", "a.b.c", "ab.b", "x.b"])
    assert submodules.take_used() == []
    submodules.add_names(["c"])
    assert submodules.take_used() == []
    submodules.add_names(["b"])
    assert submodules.take_used() == ["a.b", "a.b.c"]
    assert submodules.take_used() == []
    submodules.add_package("x", ["x", "x.b"])
    assert submodules.take_used() == ["x.b"]
    submodules.add_package("x", ["x.b"])
    submodules.add_names(["d"])
    assert submodules.take_used() == []
