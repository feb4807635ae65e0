"""Tells two builds of a dataset apart, by the length and the checksums of a few samples.

Each process that builds the dataset reports both, and the trainer compares the reports. The samples are fetched with
fixed seeds, so a sample that draws random numbers is the same each time. Only samples that give equal bytes twice
count: others hold the time or draw from a generator that nobody seeds.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from swift_loader.sampling.permutation import derive_key
from swift_loader.transport.arena import Arena
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.codec import encode
from swift_loader.transport.messages import BuildReport, Checksums
from swift_loader.worker.fetch import OnError, PlannedSamples
from swift_loader.worker.process import die_with_parent, end_group, flush_streams, lead_group
from swift_loader.worker.seeding import Rng, Seeding, preserved_generators

_KEY = 0xF19E
"""Seed for the choice of samples, and for their random numbers."""

_NUM_CHOSEN = 6

_BUDGET_S = 0.005
"""No further sample is fetched after this time. The first sample is always fetched."""

_FORK_LIMIT_S = 0.5
"""How long to wait for a fork's samples at each start."""

_CHANCE = re.compile(rb"0x[0-9a-f]{8,16}|tmp[a-z0-9_]{8}")
"""Matches an address, as in an object's `repr`, and a random name made by `tempfile`."""


class SampleCheck(NamedTuple):
    """What a few samples show about a dataset."""

    checksums: Checksums = ()
    draws: bool = False
    """Whether they drew from the global random generators. If so, each sample is seeded, from the first batch on."""
    slow_fork: int = 0
    """The pid of the fork that takes too long for them, which the caller reaps. 0: there is none."""


def chosen_indices(num_samples: int) -> list[int]:
    """Return the dataset indices of the samples to check. They depend on the dataset's length alone."""
    drawn = [derive_key(_KEY, number) % num_samples for number in range(_NUM_CHOSEN)] if num_samples else []
    return list(dict.fromkeys(drawn))


def report(num_samples: int, checksums: Checksums = ()) -> BuildReport:
    """Return the report about a dataset that this process has built."""
    return BuildReport(num_samples, hash("swift_loader"), checksums)


def check_samples(dataset: Any, indices: Sequence[int], definitions: Definitions, template: int = 0) -> SampleCheck:
    """Return the checksums of those samples that are the same each time. Stops when `_BUDGET_S` is used up.

    `template`: the process whose fork this is, if it is one.

    Runs the user's code in this process. Restores the process's random generators afterwards.
    """
    taken: list[tuple[int, int]] = []
    seeding = Seeding(Rng.SAMPLE)
    fetcher = PlannedSamples(dataset, 0, OnError.RAISE, seeding, definitions)
    deadline_s = time.monotonic() + _BUDGET_S
    with preserved_generators():
        for index in indices:
            checksum = _checksum(fetcher, index, definitions, template)
            if seeding.needs_rebuild():  # the sample drew random numbers without a seed: fetch it again, with one
                checksum = _checksum(fetcher, index, definitions, template)
                seeding.needs_rebuild()
            if checksum is not None and checksum == _checksum(fetcher, index, definitions, template):
                taken.append((index, checksum))
            seeding.needs_rebuild()
            if time.monotonic() > deadline_s:
                break
    in_bulk = hasattr(dataset, "__getitems__")  # it may draw nothing, even if a single sample does
    return SampleCheck(tuple(taken), seeding.by_sample and not in_bulk)


def check_samples_in_fork(dataset: Any, indices: Sequence[int], definitions: Definitions) -> SampleCheck:
    """Look at the samples in a fork, so that a sample that opens a file or kills the process does no harm here.

    If the fork takes too long, the result only names it. It isn't killed, because its sample may be writing a file. It
    ends by itself after that sample.
    """
    parent = os.getpid()
    receive, send = os.pipe()
    flush_streams()
    pid = os.fork()
    if not pid:
        try:
            die_with_parent(parent)
            lead_group()
            checksums, draws, _ = check_samples(dataset, indices, definitions, parent)
            os.write(send, np.array([draws, *chain.from_iterable(checksums)], np.uint64).tobytes())
        finally:
            os._exit(0)
    os.close(send)
    is_done = False
    try:
        waiting = select.poll()
        waiting.register(receive)
        is_done = bool(waiting.poll(_FORK_LIMIT_S * 1000))
        data = os.read(receive, 1 << 12) if is_done else b""
    finally:
        os.close(receive)
        if is_done:
            end_group(pid)
            os.waitpid(pid, 0)
    if not is_done:
        return SampleCheck(slow_fork=pid)
    draws, *numbers = np.frombuffer(data, np.uint64).tolist() or [0]
    return SampleCheck(tuple(zip(numbers[::2], numbers[1::2], strict=True)), bool(draws))


def _has_number(structure: bytes, number: int) -> bool:
    """Return whether a number is in it: as text, or in a pickle (BININT1, BININT2 or BININT, then the bytes)."""
    opcode, size = (b"K", 1) if number < 1 << 8 else (b"M", 2) if number < 1 << 16 else (b"J", 4)
    as_text = rb"(?<!\d)0*%d(?!\d)" % number
    return opcode + number.to_bytes(size, "little") in structure or re.search(as_text, structure) is not None


def _checksum(fetcher: PlannedSamples, index: int, definitions: Definitions, template: int) -> int | None:
    """Return the checksum of one sample; None if it fails, can't be encoded, or seems to tell the process.

    The caller calls `Seeding.needs_rebuild`.
    """
    try:
        samples = fetcher.fetch_indices(_KEY, 0, [index]).samples
        arena = Arena(np.empty(0, np.uint8))
        encoded = encode(samples[0], arena, definitions)
        memory = np.zeros(arena.used, np.uint8)
        arena.move_to(memory)
    except Exception:  # the error is reported if the loop asks for the sample
        return None
    structure = _CHANCE.sub(b"", encoded.meta)
    ids = [os.getpid()] + [template] * bool(template)
    return None if any(_has_number(structure, pid) for pid in ids) else crc32(structure, crc32(memory.data))
