from __future__ import annotations

import os
import subprocess
import sys

import pytest

from swift_loader.worker.noted_environ import noting_reads


@pytest.mark.parametrize(
    "read",
    [
        lambda: os.environ.get("RANK"),
        lambda: os.getenv("RANK"),
        lambda: "RANK" in os.environ,
        lambda: dict(os.environ),
    ],
)
def test_each_way_to_read_a_variable_of_the_rank_is_noted(read: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(read)
    monkeypatch.setenv("RANK", "1")
    before = os.environ
    with noting_reads(by_installed=True) as found:
        read()
    assert "RANK" in found
    assert os.environ is before
    with noting_reads(by_installed=True) as found:
        os.environ.get("HOME")
    assert not found
    read()
    assert not found


def test_importing_torch_reads_nothing_of_the_rank() -> None:
    code = (
        "from swift_loader.worker.noted_environ import noting_reads\n"
        "with noting_reads(by_installed=False) as found:\n"
        "    import torch\n"
        "print(found)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
