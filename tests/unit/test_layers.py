"""The package's layers: what each folder may import, and what the pure ones never reach, not even through others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import swift_loader
from tests.support.imports import PACKAGE, Graph, imports_of, is_within

GRAPH = Graph()

FOUNDATION = {
    "errors",
    "failpoints",
    "inference_mode",
    "integers",
    "interrupts",
    "log",
    "metrics",
    "notices",
    "process_owner",
}
"""Modules at the top that most others may import. Each has its own rule below."""

RULES: dict[str, set[str]] = {
    # What is below everything.
    "errors": set(),
    "failpoints": set(),
    "inference_mode": set(),
    "integers": set(),
    "interrupts": set(),
    "unknown_options": set(),
    "process_owner": {"errors"},
    "notices": {"errors"},
    "log": {"checks"},
    "metrics": {"process_owner", "transport.messages", "scheduler.actions"},
    "checks": {"integers", "sampling"},
    "auto_workers": {"checks"},
    "ray_executor": {"checks"},
    # Pure: which samples, where a run is; which rank this is, and do the ranks agree.
    "sampling": {"errors", "integers"},
    "ranks": {"errors", "notices", "sampling"},
    # How samples become a batch, what lies between the processes, and what runs in a worker.
    "batch": {"errors"},
    "transport": {"errors", "failpoints", "batch"},
    "worker": {"errors", "failpoints", "checks", "sampling", "batch", "transport"},
    # Decides, and touches nothing.
    "scheduler": {"errors", "sampling"},
    # Says what was measured, predicts and advises; touches nothing.
    # Chooses the number of workers, by what was measured.
    "tuning": {"metrics.machine", "metrics.observations"},
    "report": {"metrics.observations", "sampling", "scheduler"},
    # Options are said once, so all that they are about is below them.
    "options": {
        "process_owner",
        "checks",
        "auto_workers",
        "ray_executor",
        "log",
        "ranks",
        "sampling",
        "scheduler",
        "worker",
    },
    # Act, and decide nothing; they know neither who delivers nor who asks.
    "executors": {
        *FOUNDATION,
        "options",
        "ranks.group",
        "ranks.node",
        "ray_executor",
        "sampling",
        "batch",
        "transport",
        "worker",
        "scheduler",
    },
    # Runs a scheduler over an executor, for the loop.
    "delivery": {*FOUNDATION, "sampling", "transport", "scheduler", "executors"},
    # Moves batches, from wherever they come.
    "device": {*FOUNDATION, "checks", "ranks", "sampling", "batch", "transport.segments"},
    # One rank, from start to close.
    "session": {*FOUNDATION, "report", "options", "sampling", "worker", "scheduler", "executors", "delivery", "device"},
    "preparation": {*FOUNDATION, "options", "sampling", "worker", "executors"},
    "lifecycle": {
        *FOUNDATION,
        "checks",
        "options",
        "ranks",
        "sampling",
        "executors.sharing",
        "device",
        "preparation",
        "session",
    },
    # The loader: a signature and its passes, no machinery.
    "next_lock": {"process_owner"},
    "passes": {
        *FOUNDATION,
        "checks",
        "options",
        "sampling",
        "scheduler",
        "next_lock",
        "lifecycle",
        "session",
        "tuning",
    },
    "iterator": {*FOUNDATION, "delivery", "session", "passes"},
    "loader": {
        *FOUNDATION,
        "report",
        "checks",
        "options",
        "unknown_options",
        "ranks.choice",
        "sampling",
        "scheduler",
        "session",
        "lifecycle",
        "passes",
        "iterator",
    },
    # The drop-in class: torch's signature, on the same scheduler and executors.
    "dataloader": {
        *FOUNDATION,
        "report",
        "tuning",
        "auto_workers",
        "checks",
        "options",
        "ray_executor",
        "ranks",
        "sampling",
        "batch",
        "scheduler",
        "worker",
        "executors",
        "delivery",
        "transport.index_array",
    },
    # Stages over any source, on the same scheduler and executors.
    "pipeline": {
        *FOUNDATION,
        "checks",
        "options",
        "ranks",
        "sampling",
        "scheduler",
        "worker",
        "executors",
        "delivery",
    },
    # For users only.
    "samplers": {"errors", "integers", "notices", "checks", "sampling", "ranks", "worker.generators"},
    "testing": {"batch"},
    "vision": {
        "errors",
        "notices",
        "checks",
        "unknown_options",
        "ranks",
        "sampling",
        "samplers",
        "batch",
        "worker",
        "executors",
        "device",
        "dataloader",
        "loader",
        "report",
    },
    "integrations": {"dataloader", "report"},
    # The command line. It names the modules of its subcommands, and imports them when they are run.
    "cli": set(),
    "replay": {
        "errors",
        "notices",
        "checks",
        "options",
        "ranks.ranks",
        "sampling",
        "scheduler",
        "batch",
        "worker",
        "session",
        "loader",
        "cli",
    },
    "__main__": {"cli"},
    # Examines a dataset: as a worker would run it, and by a loader of its own.
    "doctor": {"cli", "sampling", "batch", "transport", "worker", "executors.environment", "loader", "testing"},
}
"""A folder or a module at the top, and what it may import: folders or modules. Itself always."""

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("dataloader.dataloader", "integrations.accelerate"): "imported when Accelerate asks the loader, so it is there",
    ("device.prefetch", "delivery.delivery"): "a batch with its place in the epoch, which is what it moves",
    ("device.prefetcher", "delivery.delivery"): "the same, made of what the user's iterable gives",
}
"""An import that no rule allows and that isn't followed from a pure module, and why it is right."""

PURE_LIBRARIES = (
    "__future__",
    "collections",
    "copy",
    "dataclasses",
    "dis",
    "enum",
    "functools",
    "heapq",
    "math",
    "numpy",
    "operator",
    "pickle",
    "re",
    "struct",
    "types",
    "typing",
    "zlib",
)
"""All that pure modules import from outside the package: no I/O, processes, threads, clocks or hidden state, and no
torch, which takes a second to import."""

IMPURE_PARTS = ("numpy.random", "numpy.ctypeslib", "numpy.testing")
"""Parts of a pure library that aren't."""

PURE_FOLDERS = ("sampling", "scheduler", "doctor.rules")
PURE = [
    *(name for name in GRAPH.modules if is_within(name, *PURE_FOLDERS)),
    "batch.tree",
    "errors",
    "integers",
    "delivery.cursor",
    "delivery.phase",
    "metrics.histogram",
    "metrics.observations",
    "metrics.slowest",
    "metrics.timeline",
    "ranks.group",
    "ranks.mesh",
    "report.advice",
    "report.breakdown",
    "report.cores",
    "report.flat",
    "report.life",
    "report.notice",
    "report.prediction",
    "report.series",
    "report.simulation",
    "report.slowdown",
    "report.verdict",
    "report.workload",
    "doctor.facts",
    "doctor.findings",
    "doctor.settings",
    "doctor.units",
    "tuning.limits",
    "tuning.tuner",
    "tuning.window",
    "tuning.windows",
    "samplers.buckets",
    "samplers.epochs",
    "samplers.passes",
    "samplers.shards",
    "samplers.states",
    "vision.shares",
    "transport.bodies",
    "transport.fills",
    "transport.frames",
    "transport.index_array",
    "transport.messages",
    "transport.names",
    "transport.reports",
    "transport.slots",
    "transport.task",
    "transport.template_messages",
    "worker.torch_mode",
]

WORKER_SIDE = ("worker", "transport", "batch", "vision.collate", "vision.places")


def is_pure(module: str) -> bool:
    return is_within(module, *PURE_LIBRARIES) and not is_within(module, *IMPURE_PARTS)


def unit_of(module: str) -> str:
    return module.partition(".")[0]


def test_each_folder_and_each_module_at_the_top_has_a_rule() -> None:
    assert sorted(RULES) == sorted({unit_of(module) for module in GRAPH.modules})


@pytest.mark.parametrize("unit", RULES)
def test_a_folder_imports_only_what_its_rule_allows(unit: str) -> None:
    found = [
        (module, other)
        for module in GRAPH.modules
        if unit_of(module) == unit
        for other in sorted(GRAPH.ours(module))
        if not is_within(other, unit, *RULES[unit]) and (module, other) not in EXCEPTIONS
    ]
    assert found == []


def test_the_rules_have_no_circle_outside_their_exceptions() -> None:
    done: set[str] = set()
    while left := [unit for unit in RULES if unit not in done]:
        free = [unit for unit in left if {unit_of(name) for name in RULES[unit]} <= done | {unit}]
        assert free, f"each of {left} is above another one of them"
        done.update(free)


@pytest.mark.parametrize("exception", EXCEPTIONS, ids=" -> ".join)
def test_an_exception_is_needed_and_says_why(exception: tuple[str, str]) -> None:
    module, other = exception
    assert other in GRAPH.ours(module)
    assert EXCEPTIONS[exception]


@pytest.mark.parametrize("name", PURE)
def test_a_pure_module_reaches_no_threads_processes_clocks_or_sockets(name: str) -> None:
    chains = GRAPH.chains(name, cut=list(EXCEPTIONS))
    assert [" -> ".join([*chain, outer]) for chain, outer in chains if not is_pure(outer)] == []
    file = PACKAGE / f"{name.replace('.', '/')}.py"
    assert not re.search(r"\bnp\.random\b", file.read_text() if file.exists() else "")


@pytest.mark.parametrize("library", PURE_LIBRARIES)
def test_a_pure_module_imports_each_of_these_libraries(library: str) -> None:
    assert any(is_within(outer, library) for name in PURE for _, outer in GRAPH.chains(name, cut=list(EXCEPTIONS)))


@pytest.mark.parametrize("module", ["os", "time", "torch", "secrets", "numpy.random", "numpy.random.Generator"])
def test_what_does_io_or_has_hidden_state_is_not_pure(module: str) -> None:
    assert not is_pure(module)


def test_what_is_reached_through_others_is_found(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "folder").mkdir(parents=True)
    for name, source in {
        "__init__": "import os",
        "a": "from package import b\nimport math",
        "b": "from package.folder.c import thing",
        "folder/__init__": "import mmap",
        "folder/c": "from ..d import later\ndef thing():\n    import time",
        "d": "if TYPE_CHECKING:\n    import socket\nfrom package import a",
    }.items():
        (package / f"{name}.py").write_text(source)
    graph = Graph(package)
    assert graph.modules == ["a", "b", "d", "folder", "folder.c"]
    assert set(graph.chains("a")) == {
        (("a",), "math"),
        (("a", "b", "folder.c"), "time"),
        (("a", "b", "folder"), "mmap"),
    }
    assert set(graph.chains("a", cut=[("b", "folder.c")])) == {(("a",), "math")}


def test_the_workers_side_imports_torch_only_where_it_is_used() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if is_within(_name_of(path), *WORKER_SIDE)]
    assert PACKAGE / "worker" / "build.py" in files
    found = [(path, module) for path in files for module, is_inner in imports_of(path) if not is_inner]
    assert [(path, module) for path, module in found if is_within(module, "torch", "dill", "cloudpickle")] == []


@pytest.mark.skipif(sys.platform != "linux", reason="the processes of other platforms share nothing")
def test_a_loader_of_one_rank_on_one_machine_imports_nothing_of_those_that_share() -> None:
    program = (
        "import sys, swift_loader.session, swift_loader.executors.process.executor\n"
        "import swift_loader.executors.process.supervisor\n"
        "print(*(name for name in sys.modules if name.startswith('swift_loader.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = done.stdout.replace("swift_loader.", "").split()
    assert "executors.process.executor" in imported
    assert [name for name in imported if is_within(name, "executors.group", "executors.ray", "worker.keeper")] == []


def _name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def test_the_public_names_are_these() -> None:
    assert swift_loader.__all__ == [
        "DataLoader",
        "DatasetMismatch",
        "DevicePrefetcher",
        "EncodeError",
        "LengthBucketBatchSampler",
        "LoaderClosed",
        "NoDescriptorsLeft",
        "ProtocolError",
        "RankDied",
        "RankMismatch",
        "RankStalled",
        "RayExecutor",
        "RemoteTraceback",
        "SampleFailure",
        "SharedMemoryFull",
        "ShuffleBatchSampler",
        "ShuffleSampler",
        "StateMismatch",
        "SwiftLoader",
        "SwiftLoaderError",
        "SwiftLoaderWarning",
        "TokenBudgetBatchSampler",
        "TooManyErrors",
        "WorkerDied",
        "WorkerError",
        "WorkerPool",
        "WorkerStalled",
        "batch_key",
        "default_collate",
        "distributed",
        "sample_rng",
        "to_device",
    ]
    assert dir(swift_loader) == swift_loader.__all__
    assert all(getattr(swift_loader, name).__name__ == name for name in swift_loader.__all__)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Loader'"):
        swift_loader.Loader  # noqa: B018 - looking it up is the test
