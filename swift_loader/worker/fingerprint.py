"""Whether two builds of a dataset are the same one: its length, and the checksums of a few samples.

Each process that builds the dataset reports both, and the trainer compares them. The samples are fetched under fixed
keys, so that one that draws random numbers is the same each time. A sample that differs all the same needn't mean that
the dataset does: it may hold a time or a process id. So it is looked at again before anything is said.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from select import poll
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from swift_loader.permutation import derive_key
from swift_loader.transport.arena import Arena
from swift_loader.transport.board import Board
from swift_loader.transport.codec import encode
from swift_loader.transport.definitions import Definitions
from swift_loader.transport.reports import BuildReport, Checksums, Verdict
from swift_loader.worker.fetch import Fetcher, OnError
from swift_loader.worker.generators import preserved_generators
from swift_loader.worker.seeding import Rng, Seeding
from swift_loader.worker.termination import die_with_parent, end_group, flush_streams, lead_group

__all__ = ["Look", "Rebuild", "chosen_indices", "judge", "look_at_samples", "look_in_fork", "report"]

_KEY = 0xF19E
"""Of the choice of samples, and of what they draw."""

_NUM_CHOSEN = 6

_BUDGET_S = 0.005
"""After so long no further sample is fetched; the first one always is."""

_FORK_LIMIT_S = 0.25
_JUDGE_LIMIT_S = 10.0
"""How long a fork may take for its samples: at every start, and when something is wrong."""

_CHANCE = re.compile(rb"0x[0-9a-f]{8,16}|tmp[a-z0-9_]{8}")
"""An address, as in the `repr` of an object, and a name that `tempfile` has drawn."""

_JUDGE_BUDGET_S = 4.0
"""After so long, a fork doesn't begin with another sample."""


class Look(NamedTuple):
    """What a few samples tell of a dataset."""

    checksums: Checksums = ()
    draws: bool = False
    """Whether they drew from the global random generators: then all are seeded one by one, from the first batch on."""


def chosen_indices(num_samples: int) -> list[int]:
    """Return the dataset indices of the samples to look at: the same for all datasets of a length."""
    drawn = [derive_key(_KEY, number) % num_samples for number in range(_NUM_CHOSEN)] if num_samples else []
    return list(dict.fromkeys(drawn))


def report(num_samples: int, checksums: Checksums = ()) -> BuildReport:
    """Return what the trainer is told of a dataset that was built here."""
    return BuildReport(num_samples, hash("swift_loader"), checksums)


def look_at_samples(
    dataset: Any, indices: Sequence[int], definitions: Definitions, budget_s: float = _BUDGET_S
) -> Look:
    """Return the checksums of samples that can be fetched and encoded, until the budget is used up.

    Runs the user's code in this process. Its random generators are put back afterwards.
    """
    taken: list[tuple[int, int]] = []
    seeding = Seeding(Rng.SAMPLE)
    fetcher = Fetcher(dataset, 0, OnError.RAISE, seeding, definitions, Board())
    deadline_s = time.monotonic() + budget_s
    with preserved_generators():
        for index in indices:
            checksum = _checksum(fetcher, index, definitions)
            if seeding.end():  # it has drawn, unseeded
                checksum = _checksum(fetcher, index, definitions)
                seeding.end()
            if checksum is not None:
                taken.append((index, checksum))
            if time.monotonic() > deadline_s:
                break
    in_bulk = hasattr(dataset, "__getitems__")  # which may draw nothing, although a single sample does
    return Look(tuple(taken), seeding.by_sample and not in_bulk)


def look_in_fork(dataset: Any, indices: Sequence[int], definitions: Definitions) -> Look:
    """Have a fork look: a sample that opens a file or ends the process does no harm here.

    A fork that takes too long isn't waited for; it ends by itself once it has its sample, which may be writing a file.
    """
    looked = _in_fork(lambda: look_at_samples(dataset, indices, definitions), _FORK_LIMIT_S) if indices else None
    return looked or Look()


class Rebuild(NamedTuple):
    """How to build the dataset again."""

    make: Callable[[], Any]
    build_s: float
    """How long it took."""


def _look_later(look: Callable[[], Look]) -> Look:
    """Look when a clock that counts seconds has moved on."""
    poll().poll(1100)
    return look()


def judge(
    dataset: Any, again: Rebuild, reported: Checksums, definitions: Definitions, *, fetch_here: bool
) -> dict[int, Verdict]:
    """Return for each sample reported why it may differ from that of another build.

    Args:
        dataset: As it was when the report was made.
        again: Builds it again, in a fork.
        reported: Of this dataset.
        definitions: As the trainer numbers them.
        fetch_here: Whether samples may be fetched in this process.
    """
    indices = [index for index, _ in reported]

    def look(source: Callable[[], Any]) -> Look:
        return look_at_samples(source(), indices, definitions, _JUDGE_BUDGET_S)

    looks = [look(lambda: dataset)] if fetch_here else []
    rebuilt = None
    with _kept_offsets():
        looks += filter(None, [_in_fork(lambda: look(lambda: dataset), _JUDGE_LIMIT_S)])
        if not _all_differ(looks, reported):  # which is so of a process id, say, and is known at once
            later = _in_fork(lambda: _look_later(lambda: look(lambda: dataset)), _JUDGE_LIMIT_S)
            looks += filter(None, [later])
            rebuilt = _in_fork(lambda: look(again.make), _JUDGE_LIMIT_S + 2 * again.build_s)
    fetched = [dict(one.checksums) for one in looks]
    built = None if rebuilt is None else dict(rebuilt.checksums)
    return {index: _verdict(index, checksum, fetched, built) for index, checksum in reported}


def _all_differ(looks: Sequence[Look], reported: Checksums) -> bool:
    """Return whether each sample was another one in one of the looks."""
    seen = [dict(one.checksums) for one in looks]
    return all(any(one.get(index, checksum) != checksum for one in seen) for index, checksum in reported)


def _verdict(index: int, checksum: int, fetched: list[dict[int, int]], rebuilt: dict[int, int] | None) -> Verdict:
    """Judge a sample by what it was when it was fetched again, and when the dataset was built again."""
    if any(one.get(index, checksum) != checksum for one in fetched) or not any(index in one for one in fetched):
        return Verdict.UNSTABLE
    if rebuilt is None or index not in rebuilt:
        return Verdict.UNKNOWN
    return Verdict.CHANGED if rebuilt[index] == checksum else Verdict.RANDOM


def _checksum(fetcher: Fetcher, index: int, definitions: Definitions) -> int | None:
    """Return the checksum of one sample; None if it fails, or can't be encoded. The caller ends the seeding."""
    try:
        samples = fetcher.fetch(_KEY, 0, [index]).samples
        arena = Arena(np.empty(0, np.uint8))
        encoded = encode(samples[0], arena, definitions.number_of)
        memory = np.zeros(arena.used, np.uint8)
        arena.move_to(memory)
    except Exception:  # what is wrong with it is found out when it is wanted
        return None
    return crc32(_without_chance(encoded.meta), crc32(memory.data))


def _without_chance(data: bytes) -> bytes:
    """Return bytes without what differs between processes in texts: addresses, names of temporary files, the pid."""
    return _CHANCE.sub(b"", data).replace(str(os.getpid()).encode(), b"")


def _in_fork(look: Callable[[], Look], limit_s: float) -> Look | None:
    """Return what a fork of this process sees; None if it dies, or isn't done in time and is left to itself."""
    parent = os.getpid()
    receive, send = os.pipe()
    flush_streams()
    pid = os.fork()
    if not pid:
        try:
            die_with_parent(parent)
            lead_group()
            checksums, draws = look()
            os.write(send, np.array([draws, *chain.from_iterable(checksums)], np.uint64).tobytes())
        finally:
            os._exit(0)
    os.close(send)
    is_done = False
    try:
        waiting = poll()
        waiting.register(receive)
        is_done = bool(waiting.poll(limit_s * 1000))
        data = os.read(receive, 1 << 12) if is_done else b""
    finally:
        os.close(receive)
        if is_done:
            end_group(pid)
            os.waitpid(pid, 0)
    draws, *numbers = np.frombuffer(data, np.uint64).tolist() or [0]
    return Look(tuple(zip(numbers[::2], numbers[1::2], strict=True)), bool(draws)) if data else None


@contextmanager
def _kept_offsets() -> Iterator[None]:
    """Put back the offsets of open files, which forks move as well."""
    offsets = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if stat.S_ISREG(os.fstat(number).st_mode):
                offsets[number] = os.lseek(number, 0, os.SEEK_CUR)
    try:
        yield
    finally:
        for number, offset in offsets.items():
            os.lseek(number, offset, os.SEEK_SET)
