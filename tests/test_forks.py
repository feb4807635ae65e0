"""A fork of the trainer has copies of the loader's objects, and the parent has the loader."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import run_script

PROGRAM = """
import atexit, gc, multiprocessing, os, sys, warnings
from tests import datasets
from tests.helpers import ids_of, make_loader

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a process with threads forks

def forked(what):
    pid = os.fork()
    if pid == 0:
        what()
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0, status

def squared(number):
    return number * number

def drop():
    global loader, iterator
    del loader, iterator
    gc.collect()

loader = make_loader(datasets.Counting, kwargs={{"num_samples": 400}}, batch_size=4, multithread={multithread})
iterator = iter(loader)
first = next(iterator)["id"].tolist()
{body}
assert sorted(first + ids_of(iterator)) == list(range(400))
assert sorted(ids_of(loader)) == list(range(400))
loader.close()
print("all")
"""

DEEDS = {
    "closes": "forked(lambda: loader.close())",
    "closes and ends by os._exit": "forked(lambda: (loader.close(), os._exit(0)))",
    "drops it": "forked(drop)",
    "drops it and ends by os._exit": "forked(lambda: (drop(), os._exit(0)))",
    "ends by sys.exit": "forked(lambda: sys.exit(0))",
    "ends by os._exit": "forked(lambda: os._exit(0))",
    "forks in turn": "forked(lambda: forked(lambda: loader.close()))",
    "many of them": "[forked(lambda: loader.close()) for _ in range(10)]",
    "is a pool of processes": (
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "    for batch in iterator:\n"
        "        first += batch['id'].tolist()\n"
        "        assert pool.map(squared, first[-2:]) == [number**2 for number in first[-2:]]\n"
        "        if len(first) > 200:\n"
        "            break"
    ),
    "is a process of multiprocessing": (
        "process = multiprocessing.get_context('fork').Process(target=loader.close)\n"
        "process.start(); process.join()\n"
        "assert process.exitcode == 0"
    ),
}


@pytest.mark.parametrize("multithread", [True, False])
@pytest.mark.parametrize("deed", DEEDS)
def test_a_fork_that_does_this_leaves_the_loader_alone(deed: str, multithread: bool, tmp_path: Path) -> None:
    code = PROGRAM.format(body=DEEDS[deed], multithread=multithread)
    assert run_script(code, via="-c", folder=tmp_path) == "all\n"


@pytest.mark.parametrize("start_method", ["template", "spawn"])
def test_a_fork_that_holds_copies_of_the_pipes_does_not_delay_close(start_method: str, tmp_path: Path) -> None:
    code = """
        import os, sys, warnings
        import psutil
        from tests import datasets
        from tests.helpers import make_loader

        warnings.simplefilter("ignore", DeprecationWarning)
        loader = make_loader(datasets.Counting, start_method=sys.argv[1])
        iterator = iter(loader)
        next(iterator)
        family = psutil.Process().children(recursive=True)
        hold, release = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(release)
            os.read(hold, 1)
            os._exit(0)
        loader.close()
        assert not psutil.wait_procs(family, timeout=2)[1]
        os.close(release)
        assert os.waitpid(pid, 0)[1] == 0
    """
    assert run_script(code, start_method, via="-c", folder=tmp_path) == ""
