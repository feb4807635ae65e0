"""A cache after kills, on a full disk, in a damaged or foreign file, used by several runs at once: right samples, or a
typed error.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from swift_loader import CacheCorrupt, CacheMismatch, SwiftLoader, cache, cached
from swift_loader.shared import store
from swift_loader.transport import failpoints
from tests.support import faults
from tests.support.datasets import identity
from tests.support.helpers import START_METHOD, set_faults, slow, wait_until
from tests.system.test_guards import switching

LENGTH = 30
POINTS = [point.value for point in faults.Failpoint if point.value.startswith("cache.")]
TYPED = (CacheMismatch, CacheCorrupt)

both = pytest.mark.parametrize("where", ["memory", "file"])


class Notes:
    """Sample i has an array full of i. A file notes which samples were made, another one may change them all."""

    def __init__(self, folder: Path, length: int = LENGTH) -> None:
        self.folder, self.length = str(folder), length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        with open(f"{self.folder}/log", "ab", buffering=0) as log, suppress(OSError):  # the test of a full disk
            log.write(b"%d\n" % index)
        change = Path(self.folder, "changed").exists()
        return {"id": index, "x": np.full(20 + index, index + change, np.int16), "name": f"sample {index}"}


def made(folder: Path) -> list[int]:
    """Return which samples were made, and forget it."""
    log = folder / "log"
    found = sorted(map(int, log.read_text().split())) if log.exists() else []
    log.unlink(missing_ok=True)
    return found


def open_cache(folder: Path, where: str = "file", length: int = LENGTH) -> cache.CachedDataset:
    return cached(Notes(folder, length), where=where if where == "memory" else folder / "cache")


def check(kept: cache.CachedDataset, indices: Sequence[int] = range(LENGTH)) -> None:
    """Assert that samples are right, however they are read."""
    for source in (kept, kept._swift_loader_views):
        for index in indices:
            sample = source[index]
            assert (sample["id"], sample["name"]) == (index, f"sample {index}")
            assert sample["x"].dtype == np.int16
            assert sample["x"].tolist() == [index] * (20 + index)


def fork(task: Callable[[], object]) -> int:
    """Run a task in a fork of this process. Return its pid."""
    pid = os.fork()
    if not pid:
        try:
            task()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def end(pid: int) -> int:
    """Wait for a fork. Return its exit code, as subprocess has it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def with_failpoint(item: str, kept: cache.CachedDataset, order: Sequence[int] = range(LENGTH)) -> Callable[[], None]:
    """Return a task that reads all samples, and fails where the item says."""

    def task() -> None:
        faults.ITEMS[:] = faults.parse_faults(item)
        failpoints._visit = faults.visit
        check(kept, order)

    return task


# Kills ----------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_of_a_write_costs_at_most_one_more_decode(point: str, where: str, tmp_path: Path) -> None:
    kept = open_cache(tmp_path, where)
    assert end(fork(with_failpoint(f"{point}=SIGKILL,hit=3", kept))) == -signal.SIGKILL
    check(kept)
    was_kept = point == "cache.published"
    assert made(tmp_path) == sorted([*range(LENGTH), *([] if was_kept else [2])])
    if where == "file":
        again = open_cache(tmp_path)
        made(tmp_path)
        check(again)
        assert made(tmp_path) == []


@both
def test_a_kill_before_in_or_after_any_system_call_that_writes_leaves_nothing_half(where: str, tmp_path: Path) -> None:
    """Also of those that make the file."""

    def task(folder: Path, kept: cache.CachedDataset | None, at: int) -> None:
        numbers = count()

        def dying(call: Callable[..., Any]) -> Callable[..., Any]:
            def replaced(descriptor: int, *arguments: Any) -> Any:
                if (number := next(numbers)) == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if number == at - 1 and call is pwritev:
                    views, position = arguments
                    os.pwrite(descriptor, views[-1][: len(views[-1]) // 2], position + sum(map(len, views[:-1])))
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(descriptor, *arguments)

            return replaced

        os.pwrite, os.pwritev, os.ftruncate = dying(os.pwrite), dying(os.pwritev), dying(os.ftruncate)
        check(open_cache(folder, where, 2) if kept is None else kept, range(2))

    pwritev = os.pwritev
    for at in count():
        folder = tmp_path / str(at)
        folder.mkdir()
        kept = open_cache(folder, where, 2) if where == "memory" else None
        code = end(fork(lambda folder=folder, kept=kept, at=at: task(folder, kept, at)))  # type: ignore[misc]
        check(open_cache(folder, where, 2) if kept is None else kept, range(2))
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert at >= (6 if where == "memory" else 9)


@pytest.mark.slow
@pytest.mark.parametrize(("point", "where"), [("cache.written", "memory"), *(slow(point, "file") for point in POINTS)])
@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")  # of the replacement
def test_a_worker_that_is_killed_while_it_fills_the_cache_is_replaced(
    point: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_faults(monkeypatch, f"{point}=SIGKILL,hit=3,once={tmp_path}/once")
    kept = open_cache(tmp_path, where)
    options: dict[str, Any] = {"batch_size": 5, "worker_per_consumer": 2, "shuffle": False, "validate": False}
    with SwiftLoader(dataset=kept, collate_fn=identity, start_method=START_METHOD, **options) as loader:
        ids = [sample["id"] for _ in range(2) for batch in loader for sample in batch]
    assert ids == [*range(LENGTH)] * 2
    assert (tmp_path / "once").exists()
    assert len(made(tmp_path)) <= LENGTH + 1
    check(kept)


@both
def test_a_process_that_is_stopped_while_it_makes_a_sample_does_not_hold_up_the_others(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_PATIENCE_S", 0.01)
    kept = open_cache(tmp_path, where)
    pid = fork(with_failpoint("cache.allocated=SIGSTOP,hit=1", kept))
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it is stopped")
    check(kept, [0, 0, 1, 2])
    os.kill(pid, signal.SIGCONT)
    assert end(pid) == 0
    made(tmp_path)
    check(kept)
    assert made(tmp_path) == []


# Several at once ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@both
def test_processes_that_fill_a_cache_at_once_make_each_sample_once(where: str, tmp_path: Path) -> None:
    """One of them is killed: its claim ends with it."""
    kept = open_cache(tmp_path, where) if where == "memory" else None
    go_reading, go_writing = os.pipe()

    def task(number: int) -> None:
        os.close(go_writing)
        os.read(go_reading, 1)  # until the parent has closed it
        item = "cache.allocated=SIGKILL,hit=4" if number == 0 else ""
        order = random.Random(number).sample(range(LENGTH), LENGTH)
        sys.settrace(switching)
        with_failpoint(item, kept or open_cache(tmp_path), order)()

    pids = [fork(lambda number=number: task(number)) for number in range(4)]  # type: ignore[misc]
    os.close(go_reading)
    os.close(go_writing)
    codes = [end(pid) for pid in pids]
    assert codes[0] in (0, -signal.SIGKILL)  # others may have made nearly all
    assert codes[1:] == [0, 0, 0]
    assert len(set(found := made(tmp_path))) == LENGTH
    assert where == "file" or len(found) <= LENGTH + 1  # else some were compared
    check(kept or open_cache(tmp_path))


@both
def test_threads_make_each_sample_once(where: str, tmp_path: Path) -> None:
    """Also if they are the first to open the file."""
    kept, errors, barrier = open_cache(tmp_path, where, 3), list[BaseException](), threading.Barrier(4)

    def read_all() -> None:
        barrier.wait()
        sys.settrace(switching)
        try:
            check(kept, range(3))
        except BaseException as error:
            errors.append(error)
        finally:
            sys.settrace(None)

    threads = [threading.Thread(target=read_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert made(tmp_path) == [0, 1, 2]


# No space -------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.filterwarnings("ignore:the cache .* is full")
@pytest.mark.parametrize("nbytes", [0, 5000, 10_000, 13_000, 14_123])
def test_on_a_full_disk_samples_are_right_and_later_the_rest_is_kept(nbytes: int, where: str, tmp_path: Path) -> None:
    def task() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
        try:
            limited = kept or open_cache(tmp_path)
        except OSError as error:
            os._exit(error.errno != errno.EFBIG)
        check(limited)
        assert limited._store.is_full

    kept = open_cache(tmp_path, where) if where == "memory" else None
    assert end(fork(task)) == 0
    check(kept or open_cache(tmp_path))
    if where == "file":
        made(tmp_path)
        check(open_cache(tmp_path))
        assert len(made(tmp_path)) <= cache._NUM_COMPARED


def test_a_device_is_no_cache() -> None:
    with pytest.raises(OSError, match="No space left"):
        cached([1, 2, 3], where="/dev/full")


# Files that are damaged, foreign, or changed meanwhile ----------------------------------------------------------------


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """The folder of a cache that has every second sample, and the bytes of the file."""
    folder = tmp_path_factory.mktemp("filled")
    check(open_cache(folder), range(0, LENGTH, 2))
    return folder, (folder / "cache").read_bytes()


CURSOR_AT, INDEX_AT, ENTRIES_AT = 4096, 8192, 12288
POSITIONS = [*range(400), *range(CURSOR_AT, 4120), *range(INDEX_AT, 8432), *range(ENTRIES_AT, 16_000)]
"""Those of header, cursor, index and entries. Between them there are zeros that nobody reads."""

position = st.sampled_from(POSITIONS)
flips = st.lists(st.tuples(position, st.binary(min_size=1, max_size=8)), min_size=1, max_size=3)
"""Places, and what their bytes are combined with by exclusive or."""
lengths = st.sampled_from([0, 5, CURSOR_AT, 4100, INDEX_AT, 9000, ENTRIES_AT]) | position
moves = st.tuples(position, position, st.sampled_from([8, 64, 320]))
"""Bytes that are copied elsewhere."""


def damaged(content: bytes, damage: Any) -> bytes:
    changed = bytearray(content)
    if isinstance(damage, int):
        del changed[damage:]
    elif isinstance(damage, tuple):
        source, target, nbytes = damage
        changed[target : target + nbytes] = content[source : source + nbytes]
    else:
        for place, mask in damage:
            for offset, byte in enumerate(mask[: len(content) - place]):
                changed[place + offset] ^= byte
    return bytes(changed)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=flips | lengths | moves)
@example(damage=(INDEX_AT, INDEX_AT + 16, 8))  # the place of another entry
def test_any_damage_of_a_file_leaves_right_samples_or_a_typed_error(
    damage: Any, filled: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_NUM_COMPARED", 0)  # else a comparison may tell of damage before the checksum does
    folder, content = filled
    (folder / "cache").write_bytes(damaged(content, damage))
    for _ in range(2):
        try:
            check(open_cache(folder))
        except TYPED:
            return


@pytest.mark.parametrize("content", [b"x", b"swiftldr", b"swiftldr" + bytes(range(200)), bytes(20_000)])
def test_a_file_that_is_no_cache_is_refused_and_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.write_bytes(content)
    with pytest.raises(TYPED, match=f"'{path}' is (not a cache|damaged)"):
        open_cache(tmp_path)
    assert path.read_bytes() == content


def test_a_dataset_that_has_changed_behind_the_file_is_refused(tmp_path: Path) -> None:
    check(open_cache(tmp_path))
    (tmp_path / "changed").touch()
    with pytest.raises(
        CacheMismatch, match=r"another sample \d+ than .*: sample\['x'\]\[0\] is \d+ there, and \d+ here"
    ):
        open_cache(tmp_path)


@pytest.mark.parametrize("deed", ["delete", *map(slow, ["replace", "empty", "cut", "clear"])])
def test_a_file_that_changes_while_it_is_used_gives_right_samples_or_a_typed_error(deed: str, tmp_path: Path) -> None:
    kept, path = open_cache(tmp_path), tmp_path / "cache"
    check(kept, range(0, LENGTH, 2))
    if deed == "delete":
        path.unlink()
    elif deed == "replace":
        (other := tmp_path / "other").mkdir()
        (other / "changed").touch()
        assert [open_cache(other)[index]["x"][0] for index in range(LENGTH)] == [*range(1, LENGTH + 1)]
        (other / "cache").replace(path)
    else:
        nbytes = {"empty": 0, "cut": 13_000, "clear": 0}[deed]
        size = path.stat().st_size
        os.truncate(path, nbytes)
        os.truncate(path, size if deed == "clear" else nbytes)

    def task() -> None:
        try:
            check(kept)
        except (*TYPED, FileNotFoundError) as error:
            assert str(path) in str(error)  # noqa: PT017

    task()
    assert end(fork(task)) == 0
