"""A fork of the trainer has copies of the loader's objects, and the parent has the loader."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.helpers import exhaustive, exhaustive_unless, run_script

PROGRAM = """
import atexit, gc, multiprocessing, os, sys, warnings
from tests.support import datasets
from tests.support.helpers import ids_of, make_loader

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
QUICK = {"closes", "drops it and ends by os._exit", "is a pool of processes"}


@pytest.mark.parametrize("multithread", [True, exhaustive(False)])
@pytest.mark.parametrize("deed", exhaustive_unless(QUICK, DEEDS))
def test_a_fork_that_does_this_leaves_the_loader_alone(deed: str, multithread: bool, tmp_path: Path) -> None:
    code = PROGRAM.format(body=DEEDS[deed], multithread=multithread)
    assert run_script(code, via="-c", folder=tmp_path) == "all\n"


@pytest.mark.parametrize("start_method", ["template", exhaustive("spawn")])
def test_a_fork_that_holds_copies_of_the_pipes_keeps_no_process_of_the_loader(
    start_method: str, tmp_path: Path
) -> None:
    code = """
        import os, sys, warnings
        from tests.support import datasets
        from tests.support.helpers import is_gone, loader_processes, make_loader, wait_until

        warnings.simplefilter("ignore", DeprecationWarning)
        loader = make_loader(datasets.Counting, start_method=sys.argv[1])
        iterator = iter(loader)
        next(iterator)
        family = loader_processes()
        hold, release = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(release)
            os.read(hold, 1)
            os._exit(0)
        loader.close()
        wait_until(lambda: all(is_gone(process.pid) for process in family), "the end of the loader's processes")
        os.close(release)
        assert os.waitpid(pid, 0)[1] == 0
    """
    assert run_script(code, start_method, via="-c", folder=tmp_path) == ""


KEEPS_A_BATCH = """
    import multiprocessing, sys, threading, warnings
    import numpy as np
    from tests.support import datasets
    from tests.support.helpers import make_loader

    warnings.simplefilter("ignore", DeprecationWarning)
    context = multiprocessing.get_context("fork")
    go_on, is_right = context.Event(), context.Queue()

    def images_of(first):
        return np.arange(first, first + 4) % 251

    def look_at(batch, part, rows):
        del globals()["iterator"], globals()["batch"]
        go_on.wait()
        whole = part if batch is None else np.asarray(batch)[:, 0, 0, 0]
        is_right.put(bool((np.asarray(part) == rows).all() and (np.asarray(whole) == rows).all()))

    parts = {{
        "whole": lambda batch: (batch, batch[:, 0, 0, 0]),
        "slice": lambda batch: (None, batch[:, 1, 5, 7]),
        "slice of a slice": lambda batch: (None, batch[:, 1][:, 5:7][:, 0, 3]),
    }}
    options = dict(kwargs={{"num_samples": 2400}}, batch_size=4, shuffle=False, start_method=sys.argv[1])
    with make_loader(datasets.Images, **options) as loader:
        loader.start(0, {device!r})
        iterator = iter(loader)
        batch = next(iterator)
        children = []
        for number in range(6):
            whole, part = list(parts.values())[number % 3](batch)
            rows = images_of(number * 4)
            children.append(context.Process(target=look_at, args=(whole, part, rows)))
            children[-1].start()
            del whole, part
            batch = next(iterator)
        for step, batch in enumerate(iterator, 7):
            assert (np.asarray(batch)[:, 2, 9, 9] == images_of(step * 4)).all(), step
        assert step == 599
        go_on.set()
        assert [is_right.get() for _ in children] == [True] * 6
        for child in children:
            child.join()
    print("right")
"""


@pytest.mark.parametrize(
    ("start_method", "device"),
    [
        ("template", None),
        *[exhaustive(*case) for case in (("spawn", None), ("template", "cpu"), ("spawn", "cpu"))],
    ],
)
def test_a_batch_that_a_fork_keeps_stays_as_it_was(start_method: str, device: str | None, tmp_path: Path) -> None:
    code = KEEPS_A_BATCH.format(device=device)
    assert run_script(code, start_method, via="-c", folder=tmp_path) == "right\n"


@pytest.mark.slow
def test_a_batch_that_was_got_while_another_thread_forked_stays_as_it_was_in_the_child(tmp_path: Path) -> None:
    code = """
        import os, threading, warnings
        import numpy as np
        from tests.support import datasets
        from tests.support.helpers import make_loader

        warnings.simplefilter("ignore", DeprecationWarning)
        newest = [None]
        ready, is_over = os.pipe(), threading.Event()

        def fork_often():
            pids = []
            for _ in range(20):
                pid = os.fork()
                if pid == 0:
                    os.close(ready[1])
                    step, batch = newest[0]
                    os.read(ready[0], 1)  # until the parent is through
                    expected = np.arange(4 * step, 4 * step + 4) % 251
                    os._exit(0 if (batch == expected[:, None, None, None]).all() else 1)
                pids.append(pid)
            return pids

        pids = []
        with make_loader(datasets.Images, kwargs={"num_samples": 8000}, batch_size=4, shuffle=False) as loader:
            for step, batch in enumerate(loader):
                newest[0] = step, batch
                if step == 20:
                    thread = threading.Thread(target=lambda: pids.extend(fork_often()))
                    thread.start()
            thread.join()
            os.close(ready[1])
            assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 20
    """
    assert run_script(code, via="-c", folder=tmp_path) == ""


GOES_ON_IN_THE_CHILD = """
    import os, sys, warnings
    from swift_loader import SwiftLoaderError
    from tests.support import datasets
    from tests.support.helpers import ids_of, make_loader

    warnings.simplefilter("ignore", DeprecationWarning)

    def refused(what):
        try:
            got = what()
        except SwiftLoaderError as error:
            assert "fork" in str(error) and "Make a loader of its own" in str(error), error
            return True
        print("got", got)
        return False

    def child():
        deeds = {
            "goes on": lambda: next(iterator),
            "goes on again": lambda: next(iterator),
            "begins a pass": lambda: next(iter(loader)),
            "loads a state": lambda: loader.load_state_dict(state),
            "takes all": lambda: list(loader),
        }
        assert all(refused(deed) for deed in deeds.values())
        assert loader.state_dict() == state
        loader.report(), loader.failures, loader.batch_indices, len(loader), repr(loader)
        with make_loader(datasets.Counting, kwargs={"num_samples": 40}, batch_size=4) as own:
            assert sorted(ids_of(own)) == list(range(40))
        loader.close()

    options = dict(batch_size=4, shuffle=False, start_method=sys.argv[1], multithread=sys.argv[2] == "True")
    with make_loader(datasets.Counting, kwargs={"num_samples": 400}, **options) as loader:
        loader.start(0, None if sys.argv[3] == "None" else sys.argv[3])
        iterator = iter(loader)
        got = ids_of([next(iterator) for _ in range(5)])
        for _ in range(4):
            state = loader.state_dict()
            pid = os.fork()
            if pid == 0:
                child()
                sys.exit(0)
            got += ids_of([next(iterator) for _ in range(5)])
            assert os.waitpid(pid, 0)[1] == 0
        got += ids_of(iterator)
        assert got == list(range(400)), got
    print("right")
"""


@pytest.mark.parametrize(
    ("start_method", "multithread", "device"),
    [
        ("template", "True", "None"),
        *[exhaustive(*case) for case in (("template", "False", "cpu"), ("spawn", "True", "None"))],
        *[exhaustive("template", *case) for case in (("True", "cpu"), ("False", "None"))],
        exhaustive("spawn", "True", "cpu"),  # the threads are the trainer's business, and not the workers'
    ],
)
def test_a_fork_that_goes_on_with_the_iterator_is_refused(
    start_method: str, multithread: str, device: str, tmp_path: Path
) -> None:
    printed = run_script(GOES_ON_IN_THE_CHILD, start_method, multithread, device, via="-c", folder=tmp_path)
    assert printed == "right\n"


@pytest.mark.slow
def test_a_fork_is_refused_while_another_thread_of_the_trainer_waits_for_a_batch(tmp_path: Path) -> None:
    code = """
        import os, sys, threading, time, warnings
        from swift_loader import SwiftLoaderError
        from tests.support import datasets
        from tests.support.helpers import ids_of, make_loader

        warnings.simplefilter("ignore", DeprecationWarning)
        with make_loader(datasets.Slow, kwargs={"num_samples": 80}, batch_size=2, shuffle=False) as loader:
            iterator = iter(loader)
            got = ids_of([next(iterator)])
            thread = threading.Thread(target=lambda: got.extend(ids_of(next(iterator) for _ in range(10))))
            thread.start()
            for _ in range(5):
                time.sleep(0.1)
                pid = os.fork()
                if pid == 0:
                    for deed in (lambda: next(iterator), lambda: next(iter(loader)), lambda: list(loader)):
                        try:
                            deed()
                        except SwiftLoaderError:
                            continue
                        os._exit(1)
                    loader.report()
                    loader.close()
                    os._exit(0)
                assert os.waitpid(pid, 0)[1] == 0
            thread.join()
            assert got == list(range(22)), got
    """
    assert run_script(code, via="-c", folder=tmp_path) == ""


def test_without_workers_a_fork_goes_on_with_its_own_copy(tmp_path: Path) -> None:
    code = """
        import os, sys
        from tests.support import datasets
        from tests.support.helpers import ids_of, make_loader

        with make_loader(datasets.Counting, workers=0, batch_size=4, shuffle=False) as loader:
            iterator = iter(loader)
            got = ids_of([next(iterator)])
            pid = os.fork()
            got += ids_of(iterator)
            assert got == list(range(100)), got
            if pid:
                assert os.waitpid(pid, 0)[1] == 0
    """
    assert run_script(code, via="-c", folder=tmp_path) == ""


@pytest.mark.slow
def test_a_fork_while_an_interpreter_is_started_holds_nothing_up(tmp_path: Path) -> None:
    code = """
        import os, signal, subprocess, threading
        from swift_loader import SwiftLoader

        children, threads = [], []

        def fork():
            pid = os.fork()
            if pid == 0:
                signal.pause()
            children.append(pid)

        real = subprocess._fork_exec

        def fork_exec(*arguments):  # the pipe, whose end tells of the interpreter's start, is open here
            thread = threading.Thread(target=fork)
            threads.append(thread)
            thread.start()
            thread.join(0.3)  # it may have to wait until the interpreter has been started
            return real(*arguments)

        subprocess._fork_exec = fork_exec
        with SwiftLoader(lambda: list(range(20)), batch_size=2, worker_per_consumer=2) as loader:
            print(len(list(loader)), len(threads))
        for thread in threads:
            thread.join()
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)
    """
    if not hasattr(subprocess, "_fork_exec"):
        pytest.skip("this Python starts processes in another way")
    assert run_script(code, folder=tmp_path, options=("-W", "ignore")) == "10 1\n"  # the test's own fork, Python 3.12


STAGES = """
import asyncio, gc, os, sys, warnings
from swift_loader.pipeline import Pipeline

warnings.simplefilter("ignore", DeprecationWarning)
warnings.simplefilter("error", ResourceWarning)

def forked(what):
    pid = os.fork()
    if pid == 0:
        what()
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0, status

async def loop_of(number):
    return asyncio.get_running_loop()

def drop():
    global pipeline
    del pipeline
    gc.collect()

def epoch():
    got = list(pipeline)
    assert len(got) == 8
    return set(map(id, got))

pipeline = Pipeline(range(8), continuous=True).map(loop_of, concurrency=2)
loops = epoch()
{body}
assert epoch() == loops
pipeline.close()
print("all")
"""


@pytest.mark.parametrize("deed", ["forked(drop)", "forked(pipeline.close)", "forked(epoch)", "forked(lambda: None)"])
def test_a_fork_that_does_this_leaves_the_stages_alone(deed: str, tmp_path: Path) -> None:
    """They keep their threads, and the event loop that the user's sessions belong to."""
    assert run_script(STAGES.format(body=deed), via="-c", folder=tmp_path) == "all\n"
