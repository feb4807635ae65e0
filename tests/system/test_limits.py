"""Where descriptors and shared memory are scarce: the loader uses a number of each that doesn't grow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swift_loader import DataLoader
from tests.support.helpers import exhaustive, run_script

FEW_DESCRIPTORS = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from tests.support import datasets
from tests.support.helpers import ids_of, make_loader

kept = []
with make_loader(datasets.Images, workers=4, kwargs={"num_samples": 80}, batch_size=4, shuffle=False) as loader:
    for _ in range(20):
        for batch in loader:
            kept.append(batch)
            del kept[:-200]
assert len(kept) == 200
for number, batch in enumerate(kept):
    assert [int(image[0, 0, 0]) for image in batch] == list(range(number % 20 * 4, number % 20 * 4 + 4)), number
print("right")
"""

LITTLE_SHARED_MEMORY = """
import os
from tests.support import datasets
from tests.support.helpers import make_loader

status = os.statvfs("/dev/shm")
assert status.f_blocks * status.f_frsize == 8 << 20, status
if FULL:
    with open("/dev/shm/filler", "wb") as filler:
        filler.write(bytes(status.f_bavail * status.f_frsize))
    assert os.statvfs("/dev/shm").f_bavail == 0
options = dict(kwargs={"num_samples": 3200, "side": 224}, batch_size=64, shuffle=False)
with make_loader(datasets.Images, **options) as loader:
    for number, batch in enumerate(loader):
        assert batch.shape == (64, 3, 224, 224)
        for row, image in enumerate(batch):
            assert (image == (number * 64 + row) % 251).all()
assert number == 49
print("right")
"""

NO_PROC = """
import warnings
from swift_loader import SwiftLoader
warnings.simplefilter("ignore")  # that workers can't be forks
for start_method in ("template", "spawn", "fork"):
    with SwiftLoader(lambda: range(8), {}, batch_size=4, shuffle=False, start_method=start_method) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]], start_method
print("right")
"""

FEW_PROCESSES = """
import ctypes, os, resource
from swift_loader import DataLoader, WorkerDied

libc = ctypes.CDLL(None, use_errno=True)
for limit in range(1, 14):
    if (child := os.fork()) == 0:
        libc.prctl(8, 1)  # PR_SET_KEEPCAPS
        os.setuid(50_000 + limit)  # a user of its own, since the limit counts all processes of the user
        header, reads_all_files = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(4, 4)
        assert libc.capset(header, reads_all_files) == 0, ctypes.get_errno()
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, 100))
        os.close(2)  # the workers' tracebacks
        loader, status = DataLoader(range(8), batch_size=4, num_workers=2), 3
        try:
            status = len(list(loader)) - 2
        except WorkerDied as error:
            assert "RLIMIT_NPROC" in str(error), error
        resource.setrlimit(resource.RLIMIT_NPROC, (100, 100))
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), end=" ")
"""


TOO_FEW_DESCRIPTORS = """
import os, resource
import torch, psutil
from swift_loader import DataLoader

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(64 - 22 - len(os.listdir("/proc/self/fd")))]
for num_free in range(21, 4, -1):
    held.append(os.open(os.devnull, os.O_RDONLY))
    try:
        list(DataLoader(range(8), 2, num_workers=2))
    except Exception as error:
        assert "file descriptors: it may have 64" in str(error), (num_free, error)
for descriptor in held:
    os.close(descriptor)
print(psutil.Process().children())
"""


def test_too_few_descriptors_are_told_and_leave_no_process(tmp_path: Path) -> None:
    assert run_script(TOO_FEW_DESCRIPTORS, via="-c", folder=tmp_path) == "[]\n"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the limit doesn't count for root alone, who can become other users")
def test_too_few_processes_are_a_typed_error_and_leave_nothing_half_made(tmp_path: Path) -> None:
    results = run_script(FEW_PROCESSES, via="-c", folder=tmp_path).split()
    assert (results[0], results[-1], set(results)) == ("3", "0", {"0", "3"})


@pytest.mark.slow
def test_few_descriptors_are_enough_for_20_epochs_of_which_the_user_keeps_200_batches(tmp_path: Path) -> None:
    assert run_script(FEW_DESCRIPTORS, via="-c", folder=tmp_path) == "right\n"


def namespace_command() -> list[str]:
    """Return the command that runs another one with mounts of its own."""
    return ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]


def reason_against_namespaces() -> str:
    """Return why no file system can be mounted here; empty if it can."""
    if shutil.which("unshare") is None:
        return "there is no unshare(1)"
    mount = [*namespace_command(), "mount", "-t", "tmpfs", "none", "/dev/shm"]
    tried = subprocess.run(mount, capture_output=True, text=True, check=False)
    return f"no mount namespace may be made here: {tried.stderr.strip()}" if tried.returncode else ""


@pytest.mark.parametrize(
    ("mount", "code"),
    [
        exhaustive("-o size=8m none /dev/shm", f"FULL = False\n{LITTLE_SHARED_MEMORY}"),
        ("-o size=8m none /dev/shm", f"FULL = True\n{LITTLE_SHARED_MEMORY}"),
        ("none /proc", NO_PROC),
    ],
    ids=["small /dev/shm", "full /dev/shm", "no /proc"],
)
def test_a_loader_needs_no_more_of_these_than_it_says(mount: str, code: str, tmp_path: Path) -> None:
    if reason := reason_against_namespaces():
        pytest.skip(reason)
    wrapper = [*namespace_command(), "sh", "-c", f'mount -t tmpfs {mount} && exec "$@"', "sh"]
    assert run_script(code, via="-c", folder=tmp_path, wrapper=wrapper) == "right\n"


def test_worker_processes_are_refused_where_gevent_has_put_greenlets_in_the_place_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data: Any = range(8)
    monkeypatch.setitem(sys.modules, "gevent.monkey", SimpleNamespace(is_module_patched=lambda name: True))
    with pytest.raises(RuntimeError, match=r"gevent has patched this process .* 0 workers"):
        next(iter(DataLoader(data, num_workers=1)))
    assert len(list(DataLoader(data, num_workers=0))) == 8
