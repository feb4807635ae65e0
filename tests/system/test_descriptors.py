"""Where the standard streams are closed, or descriptors are scarce, or many are open."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.helpers import HANG_S, ROOT, SWITCH, exhaustive, exhaustive_unless

CLOSED_STREAMS = """
import os, sys, time

def standard():
    found = {}
    for number in range(3):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue
    return found

own = standard()

import numpy as np
from swift_loader import SwiftLoader

class Talking:
    def __len__(self):
        return 96

    def __getitem__(self, index):
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                print("spoken by a worker " * 20, file=stream, flush=True)
        for number in (1, 2):
            try:
                os.write(number, b"written by a worker " * 20)
            except OSError:
                pass
        return np.full(50_000, index, np.uint8)

def is_right(batch, step):
    return (batch == np.arange(step * 4, step * 4 + 4, dtype=np.uint8)[:, None]).all()

result = "right"
with SwiftLoader(Talking, {}, batch_size=4, worker_per_consumer=2, shuffle=False, start_method=sys.argv[1]) as loader:
    loader.start(0)
    for _ in range(2):
        for step, batch in enumerate(loader):
            if not is_right(batch, step):
                result = f"step {step} is wrong"
            if sys.stderr is not None:
                print("spoken by the trainer", file=sys.stderr, flush=True)
            for _ in range(100):
                if standard() == own:
                    break
                time.sleep(0.01)  # a new one is on its way up
            else:
                result = f"descriptors in use: {standard()} instead of {own}"
with open(sys.argv[2], "w") as file:
    file.write(result)
"""


CLOSED = [part for count in range(4) for part in itertools.combinations((0, 1, 2), count)]


@pytest.mark.parametrize("start_method", ["template", exhaustive("spawn")])
@pytest.mark.parametrize("closed", exhaustive_unless({(0, 1, 2), (1,)}, CLOSED))
def test_closed_standard_streams_are_left_alone_and_no_sample_is_damaged(
    closed: tuple[int, ...], start_method: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(CLOSED_STREAMS)
    redirections = " ".join({0: "<&-", 1: ">&-", 2: "2>&-"}[number] for number in closed)
    command = f'exec "$0" "$@" {redirections}'
    arguments = [sys.executable, str(tmp_path / "script.py"), start_method, str(tmp_path / "result")]
    finished = subprocess.run(
        ["/bin/sh", "-c", command, *arguments], cwd=ROOT, timeout=HANG_S, check=False, capture_output=True
    )
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "result").read_text() == "right"
    if 2 not in closed:
        assert finished.stderr.count(b"spoken by the trainer") == 48
        assert b"spoken by a worker" in finished.stderr


FEW = """
import gc, os, resource, sys
from swift_loader import SwiftLoaderError
from tests.support import datasets
from multiprocessing import resource_tracker
from tests.support.helpers import ids_of, loader_processes, make_loader

def opened():
    return set(os.listdir("/proc/self/fd"))

make_loader(datasets.Counting, workers=0).close()
resource_tracker.ensure_running()
limits, before, outcomes = resource.getrlimit(resource.RLIMIT_NOFILE), opened(), []
start_method, workers, *few = sys.argv[1:]
for limit in map(int, few):
    loader = make_loader(datasets.Images, workers=int(workers), kwargs={"num_samples": 80}, start_method=start_method)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + limit, limits[1]))
    try:
        assert len(list(loader)) == 10
        outcomes.append("right")
    except SwiftLoaderError as error:
        assert "descriptors" in str(error) and "RLIMIT_NOFILE" in str(error), error
        outcomes.append("refused")
    finally:
        loader.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    del loader
    gc.collect()
    assert opened() <= before, (limit, opened() - before)
    assert not loader_processes()
print(*outcomes)
"""


@pytest.mark.parametrize(
    ("start_method", "workers", "limits"),
    [
        ("template", 4, range(1, 61, 20)),
        exhaustive("template", 4, (*range(1, 40, 3), 60)),
        exhaustive("spawn", 4, (*range(1, 40, 3), 60)),
        exhaustive("template", 12, range(1, 140, 9)),
    ],
)
def test_where_descriptors_run_out_the_error_says_so_and_nothing_is_left_behind(
    start_method: str, workers: int, limits: Sequence[int], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", FEW, start_method, str(workers), *map(str, limits)]
    environ = {**os.environ, SWITCH: "0"}  # a root would stay when a loader is closed
    finished = subprocess.run(
        command, cwd=ROOT, env=environ, timeout=HANG_S, check=False, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    outcomes = finished.stdout.split()
    assert outcomes[0] == "refused"
    assert outcomes[-1] == "right"


MANY = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1500)]
import warnings
from tests.support import datasets
from tests.support.helpers import ids_of, make_loader

options = dict(kwargs={"num_samples": 8, "seconds": 1}, batch_size=4, start_method=sys.argv[1], stall_warning=0.5)
with warnings.catch_warnings(record=True) as told, make_loader(datasets.Slow, validate=False, **options) as loader:
    warnings.simplefilter("always")
    assert sorted(ids_of(loader)) == list(range(8))
assert any("in __getitem__" in str(warning.message) for warning in told), told
print("right")
"""


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["template", "spawn"])
def test_stacks_are_had_where_thousands_of_descriptors_are_open(start_method: str) -> None:
    command = [sys.executable, "-c", MANY, start_method]
    finished = subprocess.run(command, cwd=ROOT, timeout=HANG_S, check=False, capture_output=True, text=True)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "right\n", "")
