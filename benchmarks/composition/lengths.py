"""Lengths of public samples, which anybody can get without an account. All have a long tail.

Man pages and speech come from Debian packages. `apt-get download` gets them, so this needs Debian or a derivative, and
package lists (`apt-get update`). Functions come from the standard library of the Python that runs this.
"""

from __future__ import annotations

import ast
import gzip
import io
import re
import shutil
import subprocess
import sysconfig
import tarfile
import wave
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_MAN_PAGES = ("manpages", "manpages-dev", "libssl-doc", "git-man", "perl-doc", "tcl8.6-doc", "tk8.6-doc")
_SPEECH = tuple(f"asterisk-core-sounds-{language}-wav" for language in ("en", "es", "fr", "it", "ru"))
_TOKEN = re.compile(rb"\w+|[^\w\s]")
_FRAME_S = 0.01


@dataclass(frozen=True, slots=True)
class LengthCase:
    """A distribution of lengths, and the budget of a batch. Lengths are cut at half the budget."""

    name: str
    title: str
    max_tokens: int
    measure: Callable[[Path], Iterator[int]]

    def lengths(self, folder: Path) -> NDArray[np.int64]:
        """Return the samples' lengths. Packages that aren't in the folder yet are downloaded to it.

        Raises:
            RuntimeError: They can't be got. The message says how.
        """
        return np.fromiter(self.measure(folder), np.int64)


def _man_pages(folder: Path) -> Iterator[int]:
    """Words and punctuation marks of each page. A page that only names another isn't one."""
    for name, content in _files(folder, _MAN_PAGES):
        if "/man/man" in name and name.endswith(".gz"):
            text = gzip.decompress(content)
            if not text.startswith(b".so "):
                yield len(_TOKEN.findall(text))


def _functions(_: Path) -> Iterator[int]:
    """Words and punctuation marks of each function and method, without those of tests."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not {"test", "tests", "idle_test", "site-packages", "dist-packages"} & set(path.relative_to(root).parts):
            source = path.read_bytes()
            try:
                tree = ast.parse(source)
            except (SyntaxError, ValueError):  # a template, or a test of the parser
                continue
            lines = source.splitlines()
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield len(_TOKEN.findall(b"\n".join(lines[node.lineno - 1 : node.end_lineno])))


def _speech(folder: Path) -> Iterator[int]:
    """Frames of 10 ms of each clip."""
    for name, content in _files(folder, _SPEECH):
        if name.endswith(".wav"):
            with wave.open(io.BytesIO(content)) as clip:
                yield max(1, round(clip.getnframes() / clip.getframerate() / _FRAME_S))


def _files(folder: Path, packages: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the packages' files."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise RuntimeError("this case needs apt-get and dpkg-deb: run it on Debian, or choose another with --only")
    missing = [package for package in packages if not any(folder.glob(f"{package}_*.deb"))]
    if missing:
        command = ["apt-get", "download", "-q", *missing]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed; run apt-get update and try again: {done.stderr.strip()}")
    for package in packages:
        command = ["dpkg-deb", "--fsys-tarfile", str(next(folder.glob(f"{package}_*.deb")))]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE) as unpacked,
            tarfile.open(None, "r|", unpacked.stdout) as tar,
        ):
            for member in tar:
                if member.isfile():
                    yield member.name, tar.extractfile(member).read()


CASES = (
    LengthCase("man pages", "pages of seven Debian packages, in words and marks", 32_768, _man_pages),
    LengthCase("functions", "functions of Python's standard library, in words and marks", 4_096, _functions),
    LengthCase("speech", "Debian's prompts for telephones in five languages, in frames of 10 ms", 4_096, _speech),
)
