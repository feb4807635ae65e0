from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import swift_loader

PACKAGE = Path(swift_loader.__file__).parent
PURE = [
    "bad_samples",
    "in_flight",
    "integers",
    "order",
    "plan",
    "progress",
    "run",
    "state",
    "permutation",
    "engine/builds",
    "engine/casualties",
    "engine/ledger",
    "engine/stalls",
    "transport/slots",
    "transport/bodies",
    "transport/frames",
    "transport/messages",
    "transport/names",
    "transport/reports",
    "transport/steps",
    "batch/collate",
    "batch/tree",
]
WORKER_FOLDERS = ("worker", "transport", "batch")
WORKER_SIDE = [
    *sorted(str(path.relative_to(PACKAGE)) for name in WORKER_FOLDERS for path in (PACKAGE / name).glob("**/*.py")),
    "vision/__init__.py",
    "vision/collate.py",
]


class Import(NamedTuple):
    module: str
    is_inner: bool
    """In a function: when that runs, not when the module is imported."""


def imports_of(file: Path) -> list[Import]:
    package = [PACKAGE.name, *file.relative_to(PACKAGE).parts[:-1]]
    return list(_imports(ast.parse(file.read_text()).body, package, is_inner=False))


def _imports(nodes: list[ast.AST] | list[ast.stmt], package: list[str], *, is_inner: bool) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, is_inner) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield Import(module, is_inner)
            yield from (Import(f"{module}.{alias.name}", is_inner) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node.orelse, package, is_inner=is_inner)
        else:
            inner = is_inner or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _imports(list(ast.iter_child_nodes(node)), package, is_inner=inner)


def is_within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_the_public_names_are_these() -> None:
    assert swift_loader.__all__ == [
        "DatasetMismatch",
        "DevicePrefetcher",
        "EncodeError",
        "LoaderClosed",
        "NoDescriptorsLeft",
        "ProtocolError",
        "RemoteTraceback",
        "SampleFailure",
        "SharedMemoryFull",
        "StateMismatch",
        "SwiftLoader",
        "SwiftLoaderError",
        "SwiftLoaderWarning",
        "TooManyErrors",
        "WorkerDied",
        "WorkerError",
        "WorkerStalled",
        "batch_key",
        "default_collate",
        "sample_rng",
        "to_device",
    ]
    assert dir(swift_loader) == swift_loader.__all__
    assert all(getattr(swift_loader, name).__name__ == name for name in swift_loader.__all__)


def test_the_public_class_has_only_what_users_and_frameworks_call() -> None:
    assert [name for name in dir(swift_loader.SwiftLoader) if not name.startswith("_")] == [
        "batch_indices",
        "batch_sampler",
        "batch_size",
        "close",
        "collate_fn",
        "dataset",
        "failures",
        "has_started",
        "load_state_dict",
        "num_padding",
        "prepare",
        "report",
        "sampler",
        "set_epoch",
        "start",
        "state_dict",
        "with_collate_fn",
    ]


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Loader'"):
        swift_loader.Loader  # noqa: B018 - looking it up is the test


def test_the_workers_side_does_not_import_the_trainers() -> None:
    trainer = ("swift_loader.engine", "swift_loader.loader", "swift_loader.session", "swift_loader.options")
    found = [(file, module) for file in WORKER_SIDE for module, _ in imports_of(PACKAGE / file)]
    assert ("worker/build.py", "swift_loader.batch.collate") in found
    assert [(file, module) for file, module in found if is_within(module, *trainer)] == []


def test_the_workers_side_imports_torch_only_where_it_is_used() -> None:
    found = [(file, module) for file in WORKER_SIDE for module, is_inner in imports_of(PACKAGE / file) if not is_inner]
    assert [(file, module) for file, module in found if is_within(module, "torch", "dill", "cloudpickle")] == []


@pytest.mark.parametrize("name", PURE)
def test_a_pure_module_knows_no_threads_processes_clocks_or_sockets(name: str) -> None:
    found = [module for module, _ in imports_of(PACKAGE / f"{name}.py")]
    impure = ("threading", "multiprocessing", "time", "os", "socket", "subprocess", "select", "signal", "mmap")
    assert [module for module in found if is_within(module, *impure)] == []


def test_transport_does_not_import_the_layers_above_it() -> None:
    found = {module for path in (PACKAGE / "transport").glob("*.py") for module, _ in imports_of(path)}
    ours = {module for module in found if is_within(module, "swift_loader")} - {"swift_loader"}
    below = ("swift_loader.transport", "swift_loader.batch", "swift_loader.errors", "swift_loader.failpoints")
    assert [module for module in ours if not is_within(module, *below)] == []


def test_batch_imports_nothing_else_of_ours() -> None:
    found = {module for path in (PACKAGE / "batch").glob("*.py") for module, _ in imports_of(path)}
    ours = {module for module in found if is_within(module, "swift_loader")} - {"swift_loader"}
    assert [module for module in ours if not is_within(module, "swift_loader.batch")] == []


def test_failpoints_import_nothing_of_ours() -> None:
    found = [module for module, _ in imports_of(PACKAGE / "failpoints.py")]
    assert [module for module in found if is_within(module, "swift_loader")] == []
