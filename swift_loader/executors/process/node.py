"""Where the ranks of one run on one machine meet: a name that each of them computes, and nobody else.

The name is a digest of what must be equal: the run, the dataset and its functions, and the environment. Ranks that
differ in one of these never meet. What a launcher sets for each rank is left out.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from swift_loader.executors.process.launch import Conditions
from swift_loader.transport.payload import PayloadLayout
from swift_loader.worker.rank_environment import is_of_rank

__all__ = ["MEETINGS", "Meetings", "is_alone", "meeting_name", "run_variables"]

_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",  # torchrun, accelerate launch
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",  # MPICH, Intel MPI
    "PMI_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)

_LOCAL_RANKS = (
    "LOCAL_RANK",  # Lightning, which doesn't say how many there are
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "PMIX_RANK",
    "PALS_LOCAL_RANKID",
)

_OF_THE_RUN = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
)
"""What differs from run to run, although the dataset may be the same."""

_NAMESPACES = ("ipc", "mnt", "net", "pid", "user")
"""Processes in other namespaces see other files, or can't be told apart by their process id."""

_PIECE_BYTES = 1 << 22


def is_alone(environ: Mapping[str, str]) -> str:
    """Return why this is the only rank on its machine, as far as the launcher says; empty if there may be others."""
    for name in _LOCAL_SIZES:
        size = environ.get(name, "")
        if size.isdecimal():
            return "" if int(size) > 1 else f"the launcher started one rank on this machine ({name}={size})"
    known = any(environ.get(name, "").isdecimal() for name in _LOCAL_RANKS)
    return "" if known else "no variable of a launcher says that there are other ranks on this machine"


def meeting_name(conditions: Conditions, payload: tuple[PayloadLayout, int], run: Mapping[str, str]) -> bytes:
    """Return the address of the abstract socket where the ranks with this dataset meet.

    Args:
        conditions: Those of the template.
        payload: What it builds. The descriptor stays open.
        run: The environment variables that name the run; empty: runs meet, too.
    """
    digest = hashlib.blake2b(digest_size=20)
    for part in (*_system(), *_described(conditions), *sorted(run.items())):
        digest.update(repr(part).encode("utf-8", "backslashreplace") + b"\0")
    for piece in _pieces(payload):
        digest.update(piece)
    return b"\0swift_loader-" + digest.hexdigest().encode()


def run_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that name the run."""
    return {name: environ[name] for name in _OF_THE_RUN if name in environ}


def _system() -> Iterator[object]:
    from swift_loader import __version__

    yield __version__
    yield os.geteuid()
    for name in _NAMESPACES:
        path = Path("/proc/self/ns") / name
        yield name, path.readlink() if path.exists() else None


def _described(conditions: Conditions) -> Iterator[object]:
    """Yield what must be equal of an environment. Cores and stdout are each rank's own."""
    yield conditions.command
    yield sorted((name, value) for name, value in conditions.environ if not is_of_rank(name))
    yield conditions.path, conditions.directory, conditions.umask, conditions.limits


def _pieces(payload: tuple[PayloadLayout, int]) -> Iterator[bytes]:
    layout, descriptor = payload
    position, end = 0, layout.ends[-1]
    yield layout.pack()
    while position < end and (piece := os.pread(descriptor, min(_PIECE_BYTES, end - position), position)):
        yield piece
        position += len(piece)


class Meetings:
    """Counts the loaders of this process that have the same name but for their number.

    A later loader mustn't get the dataset of an earlier one, which another rank may still have open: what the dataset
    reads may have changed in between.
    """

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()

    def number_of(self, name: bytes) -> bytes:
        """Return which loader with this name it is, to be appended to the name."""
        self._counts[name] += 1
        return b"-%d" % self._counts[name]

    def forget(self) -> None:
        """Begin anew in a fork."""
        self._counts.clear()


MEETINGS = Meetings()
"""One per process, because the numbers of its loaders are."""

os.register_at_fork(after_in_child=MEETINGS.forget)
