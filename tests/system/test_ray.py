"""Workers that are Ray actors: a cluster of three nodes on this machine, whose actors and nodes are killed."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from swift_loader import (
    DataLoader,
    LoaderClosed,
    RayExecutor,
    SwiftLoader,
    SwiftLoaderWarning,
    WorkerDied,
    WorkerStalled,
)
from swift_loader.executors.executor import WorkerExecutor
from swift_loader.executors.ray.fleet import MixedFleet
from tests.support.checked import Checked, Reference, collate_flat, digest
from tests.support.datasets import Batched, Counting, CustomError, FailsToBuild, Misbehaving, Slow, Values
from tests.support.helpers import ROOT, exhaustive, ids_of, is_gone, wait_until, without_root
from tests.support.ray_cluster import SmallCluster, actor_pids, actors_of, references, small_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,  # beside other tests, Ray may take minutes to start an actor
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray isn't installed"),
]

LARGE = 300_000
"""Bytes of a sample whose batches are larger than what Ray sends with an answer."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SmallCluster]:
    with small_cluster() as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left_behind(cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In place of the fixture of all other tests: Ray's own processes, threads and descriptors come and go."""
    without_root(monkeypatch)
    gc.collect()
    before = references()
    threads = set(threading.enumerate())
    yield
    gc.collect()
    wait_until(lambda: references() <= before, "the end of all references")
    left = {thread.name for thread in set(threading.enumerate()) - threads}
    assert not [name for name in left if name.startswith("swift_loader")]


def executor(num_workers: int = 2, **options: Any) -> RayExecutor:
    return RayExecutor(num_workers, **{"num_cpus": 0.5, **options})


def make(dataset: Any = Checked, *, workers: int = 0, actors: int = 0, **options: Any) -> SwiftLoader:
    """Return a loader with so many workers here, or so many actors."""
    options = {"seed": 7, "batch_size": 8, "kwargs": {}, **options}
    kwargs = options.pop("kwargs")
    if actors:
        given = {"executor": executor(actors), "worker_per_consumer": workers, **options}
        return SwiftLoader(dataset, kwargs, **given)
    return SwiftLoader(dataset, kwargs, worker_per_consumer=workers, **options)


def values() -> Any:
    return Values([{"name": f"sample {i}", "deep": [(i, "ä" * i), {"x": np.arange(i)}]} for i in range(40)])


CASES: dict[str, dict[str, Any]] = {
    "arrays and draws": {"dataset": Checked},
    "large arrays": {"dataset": Checked, "kwargs": {"num_samples": 64, "nbytes": LARGE}},
    "batches of many sizes": {
        "dataset": Checked,
        "kwargs": {"big_at": 50, "big_nbytes": 2_000_000},
        "collate_fn": collate_flat,
    },
    "strings": {"dataset": values, "collate_fn": list},
    "__getitems__": {"dataset": Batched},
    "bad samples": {"dataset": Checked, "kwargs": {"fails_every": 7}, "on_error": "skip"},
    "bad samples replaced": {"dataset": Checked, "kwargs": {"fails_every": 7}, "on_error": "replace"},
}


def content(batch: Any) -> bytes:
    return digest(batch) if isinstance(batch, dict) else repr(batch).encode()


@pytest.mark.parametrize("case", CASES)
def test_batches_have_the_bytes_of_local_workers(case: str) -> None:
    options = CASES[case]
    with make(**options) as alone, make(**options, actors=3) as remote:
        for loader in (alone, remote):
            loader.skip(3, epoch=1)
        for _ in range(2):
            assert list(map(content, remote)) == list(map(content, alone))
            assert len(remote.failures) == len(alone.failures)


def test_a_batch_can_be_written_and_stays_valid_after_close() -> None:
    reference = Reference(lambda: make(kwargs={"num_samples": 64, "nbytes": LARGE}))
    with make(kwargs={"num_samples": 64, "nbytes": LARGE}, actors=2) as loader:
        kept = []
        for batch in loader:
            kept.append({name: part.copy() for name, part in batch.items()})
            batch["data"][:] = 255
        batches = list(loader)
    reference.compare(list(map(digest, kept)), 0, in_order=True)
    reference.compare(list(map(digest, batches)), 1, in_order=True)
    del batches, batch


def test_a_loop_that_keeps_all_batches_gets_more_than_the_object_store_holds() -> None:
    options = {"num_samples": 600, "nbytes": LARGE}  # 180 MB, and the store has 80
    reference = Reference(lambda: make(kwargs=options))
    with make(kwargs=options, actors=3) as loader:
        batches = list(loader)
    reference.compare(list(map(digest, batches)), 0, in_order=True)


def test_a_run_resumes_with_another_number_of_actors() -> None:
    reference = Reference(make)
    with make(actors=3) as loader:
        iterator = iter(loader)
        first = [digest(next(iterator)) for _ in range(9)]
        state = loader.state_dict()
    with make(actors=1) as loader:
        loader.load_state_dict(state)
        reference.compare(first + list(map(digest, loader)), 0, in_order=True)


def test_actors_are_added_and_removed_while_the_loop_runs() -> None:
    reference = Reference(lambda: make(kwargs={"num_samples": 800}))
    with make(kwargs={"num_samples": 800}, actors=1) as loader:
        got = []
        for number, batch in enumerate(loader):
            got.append(digest(batch))
            if number == 10:
                loader.resize(4)
                wait_until(lambda: len(actor_pids(loader)) == 4, "four actors", 60)
            if number == 60:
                loader.resize(2)
        reference.compare(got, 0, in_order=True)
        wait_until(lambda: len(actors_of(loader)) == 2, "two actors")
        assert sorted(actor.worker_id for actor in actors_of(loader)) == [0, 1]


def test_processes_of_this_machine_and_actors_build_one_epoch_together() -> None:
    reference = Reference(lambda: make(kwargs={"num_samples": 1600}))
    with make(kwargs={"num_samples": 1600}, workers=1, actors=2) as loader:
        assert loader.worker_per_consumer == 3
        got = [digest(batch) for _ in range(2) for batch in loader]
        wait_until(lambda: len(actor_pids(loader)) == 2, "two actors", 60)
        loader.set_epoch(0)
        last = [digest(batch) for batch in loader]
        assert loader._session is not None
        builders = set(loader._session.observer.observations(loader._session).batches["worker_id"])
    reference.compare(got[:200], 0, in_order=True)
    reference.compare(got[200:], 1, in_order=True)
    reference.compare(last, 0, in_order=True)
    assert builders == {0, 1, 2}


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_processes_and_actors_that_are_killed_are_replaced_and_can_be_resized() -> None:
    reference = Reference(lambda: make(kwargs={"num_samples": 1600}))
    with make(kwargs={"num_samples": 1600}, workers=2, actors=1, worker_restarts=20) as loader:
        got = []
        for number, batch in enumerate(loader):
            got.append(digest(batch))
            if number in (30, 60):
                wait_until(lambda: bool(actor_pids(loader) and local_pids(loader)), "an actor and a process", 60)
                kill(actor_pids(loader)[0])
                kill(local_pids(loader)[0])
            if number == 90:
                loader.resize(5)
            if number == 120:
                loader.resize(1)
            if number == 150:
                loader.resize(3)
    reference.compare(got, 0, in_order=True)


class Waiting(Counting):
    """Actors wait for a file when they build it, processes when they fetch from it."""

    def __init__(self, marker: str) -> None:
        super().__init__(40)
        self.marker = Path(marker)
        if "IS_ACTOR" in os.environ:
            wait_until(self.marker.exists, "the file", 60)

    def __getitem__(self, index: int) -> Any:
        wait_until(self.marker.exists, "the file", 60)
        return super().__getitem__(index)


def test_an_interrupt_while_no_actor_has_built_the_dataset_loses_nothing(tmp_path: Path) -> None:
    marker, me = tmp_path / "go", threading.get_ident()
    actor = executor(1, runtime_env={"env_vars": {"IS_ACTOR": "1"}})
    with make(Waiting, kwargs={"marker": str(marker)}, workers=1, executor=actor, validate=False) as loader:
        batches = iter(loader)

        def interrupt() -> None:
            wait_until(lambda: loader._session is not None and actors_of(loader)[0].process.is_placed, "a place", 60)
            # It blocks again, after it was told of the place.
            wait_until(lambda: "_epoll.poll" in traceback.format_stack(sys._current_frames()[me])[-1], "a wait")
            signal.pthread_kill(me, signal.SIGINT)

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        interrupting.join()
        marker.touch()
        assert len(list(batches)) == 5


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it may have ended since it was looked at
        os.kill(pid, signal.SIGKILL)


def local_pids(loader: SwiftLoader) -> list[int]:
    executor = loader._session.engine._executor if loader._session else None
    assert isinstance(executor, WorkerExecutor)
    assert isinstance(executor.fleet, MixedFleet)
    pids = [worker.process.pid for worker in list(executor.fleet.local.workers.values())]
    return [pid for pid in pids if not is_gone(pid)]


# Failures


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_killed_actors_are_replaced_and_nothing_is_lost() -> None:
    rng, reference = Random(1), Reference(lambda: make(kwargs={"num_samples": 3000}))
    with make(kwargs={"num_samples": 3000}, actors=3, worker_restarts=100) as loader:
        got, num_killed = [], 0
        for number, batch in enumerate(loader):
            got.append(digest(batch))
            if number % 18 == 9 and num_killed < 20:
                wait_until(lambda: bool(actor_pids(loader)), "an actor", 60)
                kill(rng.choice(actor_pids(loader)))
                num_killed += 1
        assert num_killed == 20
        assert loader.report()["worker_restarts"] >= 15  # two may be killed that are replaced only once, or at the end
    reference.compare(got, 0, in_order=True)


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_nodes_that_die_with_their_object_stores_lose_nothing(cluster: SmallCluster) -> None:
    options = {"num_samples": 1600, "nbytes": LARGE // 4}
    rng, reference = Random(2), Reference(lambda: make(kwargs=options))
    with make(kwargs=options, actors=5, worker_restarts=100) as loader:
        got = []
        for number, batch in enumerate(loader):
            got.append(digest(batch))
            if number % 35 == 20 and number < 180:
                cluster.kill_node(rng)
                cluster.add_node()
    reference.compare(got, 0, in_order=True)


def test_an_actor_that_dies_again_and_again_ends_the_loop_with_an_error_that_says_where() -> None:
    options: dict[str, Any] = {"kwargs": {"deed": "exit-7"}, "validate": False, "shuffle": False}
    warned = pytest.warns(SwiftLoaderWarning, match="Ray actor")
    with make(Misbehaving, actors=2, **options) as loader, warned, pytest.raises(WorkerDied) as caught:
        list(loader)
    assert "has ended two workers" in str(caught.value)
    # The sample is in batch 1. An actor that had batch 0, too, may take its answer along.
    assert "batch 1 of epoch 0" in str(caught.value) or "batch 0 of epoch 0" in str(caught.value)
    assert "Ray says" in str(caught.value)


def test_an_actor_that_hangs_is_killed_and_replaced(tmp_path: Path) -> None:
    kwargs = {"deed": "hang", "marker": str(tmp_path / "hangs")}
    options: dict[str, Any] = {"kwargs": kwargs, "validate": False, "shuffle": False, "timeout": 3}
    stalled = pytest.raises(WorkerStalled, match="dataset index 13")
    with make(Misbehaving, actors=1, **options) as loader, pytest.warns(SwiftLoaderWarning) as caught, stalled:
        list(loader)
    assert "in misbehave" in str(caught[0].message)


def test_an_error_of_the_dataset_arrives_as_it_is() -> None:
    failed = pytest.raises(CustomError, match="no luck")
    with make(Misbehaving, actors=2, validate=False, shuffle=False) as loader, failed as caught:
        list(loader)
    assert "a Ray actor, pid" in str(caught.value.__cause__)
    assert "batch 1 of epoch 0" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("kwargs", "error", "text"), [({}, CustomError, "no luck"), ({"deed": "exit-3"}, WorkerDied, "Ray says")]
)
def test_a_dataset_that_can_not_be_built_is_an_error(kwargs: Any, error: type[Exception], text: str) -> None:
    with make(FailsToBuild, kwargs=kwargs, actors=2) as loader, pytest.raises(error, match=text):
        loader.start()


def test_actors_without_a_place_are_an_error_that_says_what_there_is() -> None:
    wanted = executor(2, resources={"nowhere": 1}, placement_warning=0.2, placement_timeout=1)
    warned = pytest.warns(SwiftLoaderWarning, match="1 nowhere")
    with make(Counting, actors=2, executor=wanted) as loader, warned, pytest.raises(WorkerStalled) as caught:
        loader.start()
    assert "2 of 2 Ray actors wait for room" in str(caught.value)
    assert "CPU" in str(caught.value)


def test_a_warning_says_that_some_actors_have_no_place(cluster: SmallCluster) -> None:
    wanted = executor(4, num_cpus=cluster.num_cpus, placement_warning=0.5)  # of three nodes
    warned = pytest.warns(SwiftLoaderWarning, match="of 4 Ray actors wait for room")
    with make(Slow, kwargs={"num_samples": 400, "seconds": 0.02}, actors=4, executor=wanted) as loader, warned:
        assert len(ids_of(loader)) == 400


@contextmanager
def ray_is_busy() -> Iterator[None]:
    """Have another thread hold the lock that Ray holds in `ray.init()` and `ray.shutdown()`."""
    lock: Any = sys.modules["ray._private.worker"]._connect_or_shutdown_lock
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            is_over.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait()
    try:
        yield
    finally:
        is_over.set()
        holder.join()


def test_close_ends_while_another_thread_connects_or_disconnects() -> None:
    import ray

    loader = make(actors=1)
    next(iter(loader))
    actors = [actor.process._actor for actor in actors_of(loader)]
    with ray_is_busy():
        loader.close()
    for actor in actors:  # a shutdown, for which the lock stands here, would have ended them
        ray.kill(actor)


def test_close_does_not_wait_for_the_thread_that_connects_the_loader() -> None:
    loader, raised = make(actors=1), list[BaseException]()

    def start() -> None:
        try:
            loader.start()
        except BaseException as error:
            raised.append(error)

    starting = threading.Thread(target=start)
    with ray_is_busy():
        starting.start()
        wait_until(lambda: "connection.py" in stack_of(starting), "a thread that connects")
        loader.close()
    starting.join()
    assert [type(error) for error in raised] == [LoaderClosed]


def stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame))


def test_close_ends_all_actors_even_if_one_hangs(tmp_path: Path) -> None:
    marker = tmp_path / "hangs"
    loader = make(Misbehaving, kwargs={"deed": "hang", "marker": str(marker)}, actors=2, validate=False, shuffle=False)
    next(iter(loader))
    wait_until(marker.exists, "an actor that hangs", 60)
    pids = actor_pids(loader)
    loader.close()
    assert pids
    wait_until(lambda: all(map(is_gone, pids)), "the end of the actors")


# The drop-in class


def flat(content: Any) -> list[Any]:
    return [part for one in content for part in flat(one)] if isinstance(content, (list, tuple)) else [content]


def run(loader: DataLoader[Any], num_epochs: int = 2) -> list[Any]:
    torch.manual_seed(3)
    return [
        one.tolist() if isinstance(one, torch.Tensor) else one for _ in range(num_epochs) for one in flat([*loader])
    ]


class Remembers(Counting):
    """Counts what it gave."""

    def __init__(self) -> None:
        super().__init__(60)
        self.num_given = 0

    def __getitem__(self, index: int) -> Any:
        self.num_given += 1
        return index, self.num_given

    def state_dict(self) -> dict[str, int]:
        return {"given": self.num_given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_given = state["given"]


class Shares(torch.utils.data.IterableDataset[int]):
    """Shares out numbers to the workers."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return iter(range(info.id, 50, info.num_workers))


def datasets() -> dict[str, tuple[Any, dict[str, Any]]]:
    tensors = TensorDataset(torch.arange(4000.0).reshape(40, 100), torch.arange(40))
    return {
        "tensors": (tensors, {"shuffle": True}),
        "stateful": (Remembers(), {}),
        "stream": (Shares(), {"persistent_workers": True}),
    }


@pytest.mark.parametrize("kind", [exhaustive("tensors"), "stateful", exhaustive("stream")])
def test_a_dataloader_gives_the_same_and_resumes(kind: str) -> None:
    dataset, options = datasets()[kind]

    def loader(**workers: Any) -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=4, **options, **workers)

    local, remote = {"num_workers": 2}, {"executor": executor(2)}
    assert run(loader(**remote)) == run(loader(**local))
    torch.manual_seed(3)
    begun = loader(**remote)
    iterator = iter(begun)
    first = [next(iterator) for _ in range(3)]
    state = begun.state_dict()
    resumed = loader(**remote)
    resumed.load_state_dict(state)
    rest = list(resumed)
    torch.manual_seed(3)
    whole = list(loader(**local))
    assert [torch.as_tensor(x).tolist() for x in flat(first + rest)] == [
        torch.as_tensor(x).tolist() for x in flat(whole)
    ]


# Whole programs

SCRIPT = """
import json, os, sys
import numpy as np
from swift_loader import RayExecutor, SwiftLoader
from swift_loader.executors.ray.connection import imported_ray

class Point:
    def __init__(self, x): self.x = x

class Points:
    def __len__(self): return 20
    def __getitem__(self, index): return Point(index)

def together(points): return Point(sum(point.x for point in points))

ray = imported_ray()
with SwiftLoader(Points, batch_size=5, shuffle=False, collate_fn=together, executor=RayExecutor(2)) as loader:
    batches = list(loader)
    assert ray.is_initialized()
    print(json.dumps([batch.x for batch in batches]), type(batches[0]) is Point)
    if "--wait" in sys.argv:
        handles = loader._session.engine._executor.fleet.workers.values()
        print(json.dumps([handle.process.pid for handle in handles if handle.process.pid]), flush=True)
        sys.stdin.read()
print(ray.is_initialized())
"""

SHUTDOWN = """
import faulthandler, ray, sys
faulthandler.dump_traceback_later(110)  # to see where it hangs
from swift_loader import DataLoader, RayExecutor, SwiftLoader, WorkerDied

ray.init(configure_logging=False, log_to_driver=False)
data, executor = list(range(40000)), RayExecutor(2, num_cpus=0.5)
if "torch" in sys.argv:
    loader = DataLoader(data, 4, executor=executor)
else:
    loader = SwiftLoader(dataset=data, executor=executor, worker_per_consumer=int("beside processes" in sys.argv))
iterator = iter(loader)
for _ in range(25):
    next(iterator)
ray.shutdown()
for _ in range(2):
    try:
        list(iterator)
    except WorkerDied as error:
        print("this process isn't connected to Ray any more" in str(error), ray.is_initialized())
getattr(loader, "close", int)()
"""


def start_script(
    cluster: SmallCluster, folder: Path, *arguments: str, code: str = SCRIPT, **environ: str
) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(code)
    given = {**os.environ, "RAY_ADDRESS": cluster.address, **environ}
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        env=given,
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def output_of(script: subprocess.Popen[str]) -> tuple[str, str]:
    """Wait for a script, and return what it printed. One that hangs is killed, and the failure has all of it."""
    with script:
        try:
            return script.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            script.kill()
            out, errors = script.communicate()
            pytest.fail(f"the script hangs. It printed:\n{out}\n{errors}", pytrace=False)


def test_a_script_is_connected_and_disconnected_and_its_classes_arrive(cluster: SmallCluster, tmp_path: Path) -> None:
    out, errors = output_of(start_script(cluster, tmp_path))
    assert out.splitlines() == ["[10, 35, 60, 85] True", "False"], errors


def test_the_actors_of_a_killed_trainer_end(cluster: SmallCluster, tmp_path: Path) -> None:
    with start_script(cluster, tmp_path, "--wait") as trainer:
        assert trainer.stdout is not None
        trainer.stdout.readline()
        pids = json.loads(trainer.stdout.readline())
        assert not any(map(is_gone, pids))
        trainer.kill()
    assert pids
    wait_until(lambda: all(map(is_gone, pids)), "the end of the actors", 60)


@pytest.mark.parametrize("kind", ["swift", "torch", "beside processes"])
def test_a_shutdown_of_ray_ends_the_loop_and_connects_nothing(kind: str, cluster: SmallCluster, tmp_path: Path) -> None:
    out, errors = output_of(start_script(cluster, tmp_path, kind, code=SHUTDOWN))
    assert out == 2 * "True False\n", errors


def test_without_a_cluster_the_error_says_how_to_start_one(cluster: SmallCluster, tmp_path: Path) -> None:
    out, errors = output_of(start_script(cluster, tmp_path, RAY_ADDRESS="127.0.0.1:1"))
    assert out == ""
    assert "ConnectionError: there is no Ray cluster at address='127.0.0.1:1'" in errors
    assert "ray start --head" in errors
