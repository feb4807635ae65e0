"""What users install: the wheel has the whole package, and runs without the repository. The sdist builds the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

import swift_loader
from tests.support.pages import ROOT, Page

TIMEOUT_S = 120

pytestmark = pytest.mark.timeout(TIMEOUT_S)

SPDX_SINCE = 77
"""The release of setuptools that takes an SPDX expression as `license`."""

BUILD_SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"


def run(command: Sequence[str | Path], folder: Path) -> str:
    """Run a command; return what it prints. It doesn't find the repository unless it is told where it is."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def copy_of_the_tree(folder: Path) -> Path:
    """Return a copy of what packages are built from: building leaves folders behind."""
    tree = folder / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "swift_loader", tree / "swift_loader", ignore=shutil.ignore_patterns("__pycache__"))
    return tree


def build_wheel(source: Path, folder: Path) -> Path:
    """Return the wheel of a source tree or of an sdist."""
    has_spdx = int(metadata.version("setuptools").partition(".")[0]) >= SPDX_SINCE
    options = ["--no-build-isolation"] if has_spdx else []
    run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *options, "-w", folder, source], folder.parent)
    (wheel,) = folder.glob("*.whl")
    return wheel


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as files:
        return {name: files.read(name) for name in files.namelist()}


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment that has what swift_loader depends on, but neither swift_loader nor this repository."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @classmethod
    def make(cls, folder: Path) -> Environment:
        run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
        environment = cls(folder)
        (site_packages,) = folder.glob("lib/python*/site-packages")
        # The .pth files in there, such as that of an editable install, are not read.
        dependencies = folder / "dependencies"
        dependencies.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if not entry.name.startswith(("swift_loader", "__editable__")):
                (dependencies / entry.name).symlink_to(entry)
        (site_packages / "dependencies.pth").write_text(f"{dependencies}\n")
        return environment

    def install(self, wheel: Path) -> None:
        options = ("-q", "--no-deps", "--no-index")
        run([sys.executable, "-m", "pip", "--python", self.python, "install", *options, wheel], self.folder)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return build_wheel(copy_of_the_tree(folder), folder / "built")


@pytest.mark.slow
def test_the_wheel_has_the_whole_package_and_says_what_it_is(wheel: Path) -> None:
    files = contents(wheel)
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "swift_loader").rglob("*.py")}
    information = f"swift_loader-{swift_loader.__version__}.dist-info"
    lines = files[f"{information}/METADATA"].decode().partition("\n\n")[0].splitlines()

    assert wheel.name == f"swift_loader-{swift_loader.__version__}-py3-none-any.whl"
    assert {name for name in files if not name.startswith(information)} == sources | {"swift_loader/py.typed"}
    assert f"{information}/licenses/LICENSE" in files
    assert b"swift-loader = swift_loader.__main__:main" in files[f"{information}/entry_points.txt"]
    assert "License-Expression: Apache-2.0" in lines
    assert {"Requires-Python: >=3.10", "Classifier: Programming Language :: Python :: 3.13"} <= set(lines)


@pytest.mark.slow
def test_the_readme_s_code_runs_where_only_the_wheel_is_installed(wheel: Path, tmp_path: Path) -> None:
    environment = Environment.make(tmp_path / "environment")
    has_it = "from importlib.util import find_spec; print(find_spec('swift_loader') is not None)"
    program = tmp_path / "readme.py"
    program.write_text(Page(ROOT / "README.md").script() + "print(DataLoader.__module__)\n")

    before = run([environment.python, "-c", has_it], tmp_path)
    environment.install(wheel)
    where = run([environment.python, "-c", "import swift_loader; print(swift_loader.__file__)"], tmp_path)
    said = run([environment.python, program], tmp_path)

    assert before == "False\n"
    assert Path(where).is_relative_to(environment.folder)
    assert said == "swift_loader.dataloader.dataloader\n"


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    run([sys.executable, "-c", BUILD_SDIST, tmp_path / "sdist"], copy_of_the_tree(tmp_path))
    (sdist,) = (tmp_path / "sdist").glob("*.tar.gz")

    from_sdist = build_wheel(sdist, tmp_path / "built")

    assert from_sdist.name == wheel.name
    assert contents(from_sdist) == contents(wheel)
