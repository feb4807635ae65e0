"""Which modules of the package import which, read from their source."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import swift_loader

PACKAGE = Path(swift_loader.__file__).parent


class Import(NamedTuple):
    module: str
    is_inner: bool
    """In a function: when that runs, not when the module is imported."""


def imports_of(file: Path, package: Path = PACKAGE) -> list[Import]:
    """Return what a file imports. A name that is imported from a module counts as a module, too, as it may be one."""
    folder = [package.name, *file.relative_to(package).parts[:-1]]
    return list(_imports(ast.parse(file.read_text()).body, folder, is_inner=False))


def _imports(nodes: Sequence[ast.AST], folder: list[str], *, is_inner: bool) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, is_inner) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield Import(module, is_inner)
            yield from (Import(f"{module}.{alias.name}", is_inner) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node.orelse, folder, is_inner=is_inner)
        else:
            inner = is_inner or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _imports(list(ast.iter_child_nodes(node)), folder, is_inner=inner)


def is_within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


class Graph:
    """The modules of a package, by their names in it: `transport.arena`, and `transport` for its `__init__`."""

    def __init__(self, package: Path = PACKAGE) -> None:
        self._name = package.name
        files = {self._name_of(path.relative_to(package)): path for path in package.rglob("*.py")}
        found = {name: {module for module, _ in imports_of(path, package)} for name, path in files.items()}
        self.modules = sorted(name for name in files if name)
        self._inner = {name: self._ours(modules) & files.keys() - {name, ""} for name, modules in found.items()}
        self._outer = {name: {m for m in modules if not is_within(m, self._name)} for name, modules in found.items()}

    def ours(self, module: str) -> set[str]:
        """Return the modules of the package that a module imports."""
        return self._inner[module]

    def chains(self, module: str, cut: Sequence[tuple[str, str]] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield what a module imports from outside the package, and through which modules; `cut` isn't followed.

        A folder's `__init__` counts, because importing a module runs it. That of the package doesn't: it runs for all.
        """
        queue: deque[tuple[str, ...]] = deque([(module,)])
        seen = {module}
        while queue:
            chain = queue.popleft()
            yield from ((chain, outer) for outer in sorted(self._outer[chain[-1]]))
            followed = {inner for inner in self._inner[chain[-1]] if (chain[-1], inner) not in cut}
            folders = {inner.rpartition(".")[0] for inner in followed} - {""}
            for inner in sorted((followed | folders) - seen):
                seen.add(inner)
                queue.append((*chain, inner))

    def _ours(self, modules: set[str]) -> set[str]:
        return {module.removeprefix(f"{self._name}.") for module in modules if is_within(module, self._name)}

    @staticmethod
    def _name_of(path: Path) -> str:
        return ".".join(path.with_suffix("").parts).removesuffix("__init__").removesuffix(".")
