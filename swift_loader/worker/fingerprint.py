"""Finds out whether two builds of a dataset are the same, by the length and the checksums of a few samples.

Each process that builds the dataset reports both, and the trainer compares the reports. The samples are fetched with
fixed seeds, so a sample that draws random numbers is the same each time. If a sample still differs, the dataset may
be the same: the sample may contain a time or a process id. So such a sample is checked again before an error is raised.
"""

from __future__ import annotations

import os
import re
import select
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from swift_loader.sampling.permutation import derive_key
from swift_loader.transport.arena import Arena
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.codec import encode
from swift_loader.transport.reports import BuildReport, Checksums, Verdict
from swift_loader.worker.fetch import Fetcher, OnError
from swift_loader.worker.generators import preserved_generators
from swift_loader.worker.process_exit import die_with_parent, end_group, flush_streams, lead_group
from swift_loader.worker.seeding import Rng, Seeding

__all__ = [
    "Rebuild",
    "SampleCheck",
    "check_samples",
    "check_samples_in_fork",
    "chosen_indices",
    "judge",
    "judge_without_forks",
    "report",
]

_KEY = 0xF19E
"""Seed for the choice of samples, and for their random numbers."""

_NUM_CHOSEN = 6

_BUDGET_S = 0.005
"""No further sample is fetched after this time. The first sample is always fetched."""

_FORK_LIMIT_S = 0.25
"""How long to wait for a fork's samples at each start."""
_JUDGE_LIMIT_S = 10.0
"""How long to wait for a fork's samples after two builds differed."""

_CHANCE = re.compile(rb"0x[0-9a-f]{8,16}|tmp[a-z0-9_]{8}")
"""Matches an address, as in an object's `repr`, and a random name made by `tempfile`."""

_JUDGE_BUDGET_S = 4.0
"""As `_BUDGET_S`, for a fork that runs after two builds differed."""

_LATER_S = 1.1
"""After this time, a clock with a resolution of seconds has advanced."""


class SampleCheck(NamedTuple):
    """What a few samples show about a dataset."""

    checksums: Checksums = ()
    draws: bool = False
    """Whether they drew from the global random generators. If so, each sample is seeded, from the first batch on."""


def chosen_indices(num_samples: int) -> list[int]:
    """Return the dataset indices of the samples to check. They depend on the dataset's length alone."""
    drawn = [derive_key(_KEY, number) % num_samples for number in range(_NUM_CHOSEN)] if num_samples else []
    return list(dict.fromkeys(drawn))


def report(num_samples: int, checksums: Checksums = ()) -> BuildReport:
    """Return the report about a dataset that this process has built."""
    return BuildReport(num_samples, hash("swift_loader"), checksums)


def check_samples(
    dataset: Any, indices: Sequence[int], definitions: Definitions, budget_s: float = _BUDGET_S
) -> SampleCheck:
    """Return the checksums of those samples that can be fetched and encoded. Stops when the budget is used up.

    Runs the user's code in this process. Restores the process's random generators afterwards.
    """
    taken: list[tuple[int, int]] = []
    seeding = Seeding(Rng.SAMPLE)
    fetcher = Fetcher(dataset, 0, OnError.RAISE, seeding, definitions)
    deadline_s = time.monotonic() + budget_s
    with preserved_generators():
        for index in indices:
            checksum = _checksum(fetcher, index, definitions)
            if seeding.needs_rebuild():  # the sample drew random numbers without a seed: fetch it again, with one
                checksum = _checksum(fetcher, index, definitions)
                seeding.needs_rebuild()
            if checksum is not None:
                taken.append((index, checksum))
            if time.monotonic() > deadline_s:
                break
    in_bulk = hasattr(dataset, "__getitems__")  # it may draw nothing, even if a single sample does
    return SampleCheck(tuple(taken), seeding.by_sample and not in_bulk)


def check_samples_in_fork(
    dataset: Any,
    indices: Sequence[int],
    definitions: Definitions,
    check: Callable[[Any, Sequence[int], Definitions], SampleCheck] = check_samples,
) -> SampleCheck:
    """Look at the samples in a fork, so that a sample that opens a file or kills the process does no harm here.

    If the fork takes too long, this returns an empty result. The fork isn't killed, because its sample may be writing a
    file. It ends by itself after that sample.
    """
    sample_check = _in_fork(lambda: check(dataset, indices, definitions), _FORK_LIMIT_S) if indices else None
    return sample_check or SampleCheck()


class Rebuild(NamedTuple):
    """How to build the dataset again."""

    make: Callable[[], Any]
    build_s: float
    """How long the first build took, in seconds."""


def _check_later(sample_check: Callable[[], SampleCheck]) -> SampleCheck:
    """Look once more, after `_LATER_S`."""
    threading.Event().wait(_LATER_S)
    return sample_check()


def judge(
    dataset: Any, again: Rebuild, reported: Checksums, definitions: Definitions, *, fetch_here: bool
) -> dict[int, Verdict]:
    """Return for each reported sample why it may differ from that of another build.

    Args:
        dataset: The dataset that the report is about.
        again: Builds the dataset again, in a fork.
        reported: The report's checksums.
        definitions: Numbered as in the trainer.
        fetch_here: Whether samples may be fetched in this process.
    """
    indices = [index for index, _ in reported]

    def look(source: Callable[[], Any]) -> SampleCheck:
        return check_samples(source(), indices, definitions, _JUDGE_BUDGET_S)

    looks = [look(lambda: dataset)] if fetch_here else []
    rebuilt = None
    with _kept_offsets():
        looks += filter(None, [_in_fork(lambda: look(lambda: dataset), _JUDGE_LIMIT_S)])
        if not _all_differ(looks, reported):  # if they all differ already, as with a process id, the verdict is known
            later = _in_fork(lambda: _check_later(lambda: look(lambda: dataset)), _JUDGE_LIMIT_S)
            looks += filter(None, [later])
            rebuilt = _in_fork(lambda: look(again.make), _JUDGE_LIMIT_S + 2 * again.build_s)
    fetched = [dict(one.checksums) for one in looks]
    built = None if rebuilt is None else dict(rebuilt.checksums)
    return {index: _verdict(index, checksum, fetched, built) for index, checksum in reported}


def judge_without_forks(dataset: Any, reported: Checksums, definitions: Definitions) -> dict[int, Verdict]:
    """Return the same as `judge`, but fetch the samples in this process, and don't build the dataset again."""
    indices = [index for index, _ in reported]

    def look() -> SampleCheck:
        return check_samples(dataset, indices, definitions, _JUDGE_BUDGET_S)

    looks = [look()]
    if not _all_differ(looks, reported):
        looks.append(_check_later(look))
    fetched = [dict(one.checksums) for one in looks]
    return {index: _verdict(index, checksum, fetched, None) for index, checksum in reported}


def _all_differ(looks: Sequence[SampleCheck], reported: Checksums) -> bool:
    """Return whether each sample differed in at least one of the looks."""
    seen = [dict(one.checksums) for one in looks]
    return all(any(one.get(index, checksum) != checksum for one in seen) for index, checksum in reported)


def _verdict(index: int, checksum: int, fetched: list[dict[int, int]], rebuilt: dict[int, int] | None) -> Verdict:
    """Return the verdict on a sample, given its checksums from further fetches and from another build."""
    if any(one.get(index, checksum) != checksum for one in fetched) or not any(index in one for one in fetched):
        return Verdict.UNSTABLE
    if rebuilt is None or index not in rebuilt:
        return Verdict.UNKNOWN
    return Verdict.CHANGED if rebuilt[index] == checksum else Verdict.RANDOM


def _checksum(fetcher: Fetcher, index: int, definitions: Definitions) -> int | None:
    """Return the checksum of one sample; None if it fails or can't be encoded. The caller calls
    `Seeding.needs_rebuild`.
    """
    try:
        samples = fetcher.fetch(_KEY, 0, [index]).samples
        arena = Arena(np.empty(0, np.uint8))
        encoded = encode(samples[0], arena, definitions.number_of)
        memory = np.zeros(arena.used, np.uint8)
        arena.move_to(memory)
    except Exception:  # the error is reported if the loop asks for the sample
        return None
    # Some text differs between processes: addresses, names of temporary files, the pid.
    structure = _CHANCE.sub(b"", encoded.meta).replace(str(os.getpid()).encode(), b"")
    return crc32(structure, crc32(memory.data))


def _in_fork(sample_check: Callable[[], SampleCheck], limit_s: float) -> SampleCheck | None:
    """Run `sample_check` in a fork and return its result; None if the fork dies or takes too long. A slow fork isn't
    killed.
    """
    parent = os.getpid()
    receive, send = os.pipe()
    flush_streams()
    pid = os.fork()
    if not pid:
        try:
            die_with_parent(parent)
            lead_group()
            checksums, draws = sample_check()
            os.write(send, np.array([draws, *chain.from_iterable(checksums)], np.uint64).tobytes())
        finally:
            os._exit(0)
    os.close(send)
    is_done = False
    try:
        waiting = select.poll()
        waiting.register(receive)
        is_done = bool(waiting.poll(limit_s * 1000))
        data = os.read(receive, 1 << 12) if is_done else b""
    finally:
        os.close(receive)
        if is_done:
            end_group(pid)
            os.waitpid(pid, 0)
    draws, *numbers = np.frombuffer(data, np.uint64).tolist() or [0]
    return SampleCheck(tuple(zip(numbers[::2], numbers[1::2], strict=True)), bool(draws)) if data else None


@contextmanager
def _kept_offsets() -> Iterator[None]:
    """Restore the offsets of open files afterwards: this process shares them with its forks, which move them."""
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
