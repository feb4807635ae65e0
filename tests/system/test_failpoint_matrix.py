"""Every failpoint with every action, with and without restarts: the loop gets all of the reference order, or a prefix
of it and then a typed error; never a hang, a loss or a duplicate.

A cell's fault happens once: in the process that gets to its place first, at start, or, for the template, also later, to
the one that replaces it or to the fork that replaces a worker.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from swift_loader import LoaderClosed, SwiftLoader, SwiftLoaderError, WorkerDied
from swift_loader.executors.process import starter
from tests.support import datasets
from tests.support.faults import FAULTS, Action, Failpoint, parse_faults
from tests.support.helpers import exhaustive_unless, make_loader, set_faults, template_and_workers, wait_until

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 96, 8, 2
REFERENCE = list(range(NUM_SAMPLES)) * NUM_EPOCHS

TIMEOUT_S = 2.0
"""Of the loader: how long a worker may hang. A batch takes a millisecond."""

PATIENCE_S = 1.5
"""How long a start may hang that has no limit by itself, before it is closed."""

ENDS = {Action.SIGKILL, Action.SIGSEGV, Action.SIGABRT, Action.EXIT_0, Action.EXIT_7}
HANGS = {Action.SIGSTOP, Action.HANG}


@dataclass(frozen=True)
class Cell:
    """One fault."""

    point: Failpoint
    action: Action
    restarts: int
    later: bool
    """Not while the loader starts, but in the midst of the first epoch."""

    @property
    def name(self) -> str:
        return f"{self.point.value}-{self.action.value}-restarts={self.restarts}{'-later' * self.later}"

    @property
    def is_in_template(self) -> bool:
        return self.point.value.startswith("template.")

    @property
    def must_be_survived(self) -> bool:
        """Whether all of the reference must come."""
        if self.point in (Failpoint.WORKER_STOP, Failpoint.TEMPLATE_STOP):
            return True
        dies = self.action in ENDS or (self.action in HANGS and not self.is_in_template)
        return self.restarts > 0 and dies


POINTS = [point for point in Failpoint if not point.value.startswith("cache.")]  # see test_cache_faults
PLACES = [
    (point, later) for point in POINTS for later in ((False, True) if point.value.startswith("template.") else (False,))
]
CELLS = [Cell(point, action, restarts, later) for point, later in PLACES for action in Action for restarts in (0, 3)]

QUICK = [
    Cell(point, action, restarts, later)
    for (point, later), action, restarts in zip(PLACES, cycle(Action), cycle((3, 3, 3, 0)), strict=False)
][::2]
"""Every second place, each with one action."""


@pytest.mark.parametrize("cell", exhaustive_unless(QUICK, CELLS), ids=lambda cell: cell.name)
@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_what_arrives_is_the_reference_or_a_prefix_and_a_typed_error(
    cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    hit = (
        ",hit=3"
        if not cell.is_in_template and "boot" not in cell.point.value and "stop" not in cell.point.value
        else ""
    )
    set_faults(monkeypatch, f"{cell.point.value}={cell.action.value},once={marker}{hit}")
    if cell.is_in_template and cell.action in HANGS:
        monkeypatch.setattr(starter, "FORK_LIMIT_S", 0.5)
    if cell.later:
        marker.touch()  # as if it had happened
    dataset = partial(datasets.Slow, seconds=0.003) if cell.later else datasets.Counting
    options: dict[str, Any] = {"kwargs": {"num_samples": NUM_SAMPLES}, "shuffle": False, "batch_size": BATCH_SIZE}
    loader = make_loader(dataset, timeout=TIMEOUT_S, worker_restarts=cell.restarts, **options)

    def lose_patience() -> None:
        with suppress(AssertionError):  # what follows says that nobody got there
            wait_until(marker.exists, "the fault", 30)
        if not is_over.wait(PATIENCE_S):
            loader.close()

    is_over, impatience = threading.Event(), threading.Thread(target=lose_patience)
    hangs_for_ever = cell.is_in_template and cell.action in HANGS and not cell.later
    got: list[int] = []
    ending: Exception | None = None
    with loader:
        if hangs_for_ever:
            impatience.start()
        try:
            run(loader, got, cell, marker)
        except (SwiftLoaderError, RuntimeError) as error:
            ending = error
        if hangs_for_ever:
            is_over.set()
            impatience.join()
    assert got == REFERENCE[: len(got)]
    assert len(got) == len(REFERENCE) or ending is not None, "it ended early, without an error"
    assert ending is None or not cell.must_be_survived, ending
    assert hangs_for_ever or not isinstance(ending, LoaderClosed)
    if cell.point is Failpoint.TEMPLATE_REAPED and not cell.later:
        return  # on close, the template may be told to end before it has reaped anybody
    if not cell.later or cell.restarts:
        assert marker.exists(), "nobody got there"


def run(loader: SwiftLoader, got: list[int], cell: Cell, marker: Path) -> None:
    """Go through the epochs; if the fault is to come later, bring about what leads to it."""
    loader.start()
    for epoch in range(NUM_EPOCHS):
        for step, batch in enumerate(loader):
            got.extend(batch["id"].tolist())
            if cell.later and (epoch, step) == (0, 2):
                marker.unlink()
                bring_about(cell.point)


def bring_about(point: Failpoint) -> None:
    """Kill what is replaced by way of this point."""
    template, workers = template_and_workers()
    if point in (Failpoint.TEMPLATE_FORK_REQUESTED, Failpoint.TEMPLATE_FORKED, Failpoint.TEMPLATE_REAPED):
        workers[0].kill()
    elif point is not Failpoint.TEMPLATE_STOP:
        template.kill()


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
    with pytest.raises(ValueError, match=FAULTS) as caught:
        parse_faults(f"template.boot=raise;{item}")
    assert f"item {item!r}: " in str(caught.value)
    assert rule in str(caught.value)


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize(
    "point",
    exhaustive_unless(
        # of the others, the matrix tells
        {Failpoint.TEMPLATE_REAPED},
        POINTS,
    ),
)
def test_each_failpoint_is_reached(point: Failpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the processes of a loader that takes one epoch; what comes of it is another matter."""
    marker = tmp_path / "marker"
    variable = f"{point.value}=exit-0,once={marker}"
    if point is Failpoint.TEMPLATE_REAPED:  # on close, the template may be told to end before it has reaped anybody
        variable += f";{Failpoint.WORKER_NOTIFIED.value}=exit-7,serial=1"
    set_faults(monkeypatch, variable)
    loader = make_loader(datasets.Counting, batch_size=4)
    with loader, suppress(WorkerDied):  # a death; none if what died was replaced
        list(loader)
    assert marker.exists()
