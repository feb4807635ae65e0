"""The places where tests make a process fail: what the variable may say, and that each of them is reached."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swift_loader import WorkerDied
from swift_loader.transport.failpoints import VARIABLE, Failpoint, parse_failpoints
from tests.support import datasets
from tests.support.helpers import HANG_S, ROOT, exhaustive_unless, make_loader, set_environ


def start(code: str, variable: str | None) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if variable is not None:
        environment[VARIABLE] = variable
    return subprocess.Popen(
        [sys.executable, "-c", f"from swift_loader.transport.failpoints import *\n{code}"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(code: str, variable: str | None) -> tuple[int, str, str]:
    """Return exit code, stdout and the last line of stderr."""
    with start(code, variable) as process:
        out, err = process.communicate(timeout=HANG_S)
    return process.returncode, out, (err.splitlines() or [""])[-1]


@pytest.mark.parametrize(
    ("item", "rule"),
    [
        ("worker.lunch=SIGKILL", "'worker.lunch' is not a valid Failpoint"),
        ("worker.boot", "'' is not a valid Action"),
        ("worker.boot=SIGFOO", "'SIGFOO' is not a valid Action"),
        ("worker.boot=SIGKILL,when=3", "unexpected keyword argument 'when'"),
        ("worker.boot=SIGKILL,hit=-1", "hit must be at least 0, and p above 0 and at most 1"),
        ("worker.boot=SIGKILL,hit=", "invalid literal for int()"),
        ("worker.boot=SIGKILL,hit", "use condition=value"),
        ("worker.boot=SIGKILL,p=1.5", "hit must be at least 0, and p above 0 and at most 1"),
        ("worker.boot=SIGKILL,p=nan", "hit must be at least 0, and p above 0 and at most 1"),
    ],
)
def test_an_error_names_the_item_and_the_rule(item: str, rule: str) -> None:
    with pytest.raises(ValueError, match=VARIABLE) as caught:
        parse_failpoints(f"template.boot=raise;{item}")
    assert f"item {item!r}: " in str(caught.value)
    assert rule in str(caught.value)


def test_a_malformed_variable_is_an_error_at_import() -> None:
    code, _, error = run("", "worker.boot=lunch")
    assert code == 1
    assert error.startswith(f"ValueError: {VARIABLE}: item 'worker.boot=lunch': 'lunch' is not a valid Action")


@pytest.mark.parametrize("variable", [None, ""])
def test_without_the_variable_a_failpoint_does_nothing(variable: str | None) -> None:
    code = """
identify(0)
for point in Failpoint:
    failpoint(point)
print("here")
"""
    assert run(code, variable) == (0, "here\n", "")


COUNTS = """
def hits(point, times):
    found = []
    for number in range(1, times + 1):
        try:
            failpoint(point)
        except RuntimeError:
            found.append(number)
    return found
"""


@pytest.mark.parametrize(
    ("variable", "code", "expected"),
    [
        ("template.boot=raise,hit=3", "print(hits(Failpoint.TEMPLATE_BOOT, 9))", "[3]"),
        ("template.boot=raise,serial=1,hit=2", "identify(1); print(hits(Failpoint.TEMPLATE_BOOT, 9))", "[2]"),
        ("template.boot=raise,serial=1", "identify(0); print(hits(Failpoint.TEMPLATE_BOOT, 9))", "[]"),
        ("template.boot=raise,serial=0", "print(hits(Failpoint.TEMPLATE_BOOT, 9))", "[]"),
        ("template.boot=raise,hit=2;template.boot=raise,hit=5", "print(hits(Failpoint.TEMPLATE_BOOT, 9))", "[2, 5]"),
        (
            "template.boot=raise,hit=2",
            "hits(Failpoint.TEMPLATE_BOOT, 1); identify(0); print(hits(Failpoint.TEMPLATE_BOOT, 9))",
            "[2]",
        ),
        ("worker.boot=raise", "print(hits(Failpoint.WORKER_BOOT, 2), hits(Failpoint.WORKER_STOP, 2))", "[] []"),
        ("worker.boot=raise", "identify(0); print(hits(Failpoint.WORKER_BOOT, 2))", "[1, 2]"),
        ("template.stop=raise", "print(hits(Failpoint.TEMPLATE_STOP, 2))", "[1, 2]"),
    ],
)
def test_all_conditions_of_an_item_must_hold(variable: str, code: str, expected: str) -> None:
    assert run(COUNTS + code, variable) == (0, f"{expected}\n", "")


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize(
    "point",
    exhaustive_unless(
        # of the others, the matrix tells
        {Failpoint.TEMPLATE_REAPED},
        list(Failpoint),
    ),
)
def test_each_failpoint_is_reached(point: Failpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the processes of a loader that takes one epoch; what comes of it is another matter."""
    marker = tmp_path / "marker"
    variable = f"{point.value}=exit-0,once={marker}"
    if point is Failpoint.TEMPLATE_REAPED:  # on close, the template may be told to end before it has reaped anybody
        variable += f";{Failpoint.WORKER_NOTIFIED.value}=exit-7,serial=1"
    set_environ(monkeypatch, VARIABLE, variable)
    loader = make_loader(datasets.Counting, batch_size=4)
    with loader, contextlib.suppress(WorkerDied):  # a death; none if what died was replaced
        list(loader)
    assert marker.exists()
