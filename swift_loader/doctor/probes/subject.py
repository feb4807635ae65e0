"""The dataset under examination: builds it, and fetches its samples one by one, seeded as the loader seeds them."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from swift_loader.batch.tree import type_name
from swift_loader.cli import find_target, made_by
from swift_loader.doctor.facts import Construction, Failure, Line
from swift_loader.doctor.probes.board import Board, Phase
from swift_loader.doctor.probes.hazards import hazards_now, hazards_since
from swift_loader.doctor.probes.holdings import holders_of, unsendable_part
from swift_loader.doctor.probes.own_code import as_shown, is_users_file
from swift_loader.doctor.probes.some import without_loader
from swift_loader.doctor.rules.lines import line_of
from swift_loader.worker.seeding import Fetching, Rng, Seeding, seed_for_construction
from swift_loader.worker.torch_settings import set_num_threads

__all__ = ["SEED", "Subject", "WatchedFetching", "build", "describe_failure"]

SEED = 0x0D0C
"""Seed of all that is fetched."""

_NUM_LENGTHS = 3
_MAX_TEXT = 300


class WatchedFetching(Fetching):
    """Also tells whether `sample_rng()` was called."""

    __slots__ = ("used_rng",)

    def __init__(self, epoch: int, index: int) -> None:
        super().__init__(SEED, epoch, [index], [])
        self.used_rng = False

    def generator(self) -> Any:
        """Return the generator of the sample."""
        self.used_rng = True
        return super().generator()


class Subject:
    """Fetches samples by index. Not thread-safe."""

    def __init__(self, dataset: Any, num_samples: int, board: Board) -> None:
        """Fetch from a dataset, and say on the board which sample is being fetched."""
        self.dataset = dataset
        self.num_samples = num_samples
        self._board = board
        self._seeding = Seeding(Rng.SAMPLE, by_sample=True)
        self.get: Callable[[int], Any] = _getter(dataset)
        """Returns a sample. Call `prepare` before."""
        self.num_fetches = 0

    def prepare(self, index: int, epoch: int = 0) -> WatchedFetching:
        """Seed for a sample, as the loader does."""
        fetching = WatchedFetching(epoch, index)
        self.num_fetches += 1
        self._board.enter(Phase.FETCHING, index)
        self._seeding.begin(fetching)
        self._seeding.begin_sample(0)
        return fetching

    def leave(self) -> None:
        """End a sample that was prepared."""
        self._seeding.needs_rebuild()
        self._board.enter(Phase.LOOKING)

    def fetch(self, index: int, epoch: int = 0) -> Any:
        """Return a sample with its seeds.

        Raises:
            Exception: Whatever the dataset raises.
        """
        self.prepare(index, epoch)
        try:
            return self.get(index)
        finally:
            self.leave()

    def fails(self, index: int) -> bool:
        """Return whether a sample raises."""
        try:
            self.fetch(index)
        except (Exception, SystemExit):
            return True
        return False


def _getter(dataset: Any) -> Callable[[int], Any]:
    """Return `__getitem__`, or the same by `__getitems__` for a dataset that only has that."""
    torch_data = sys.modules.get("torch.utils.data")
    own = getattr(type(dataset), "__getitem__", None)
    is_torchs = torch_data is not None and own is torch_data.Dataset.__getitem__
    if hasattr(dataset, "__getitems__") and (own is None or is_torchs):
        return lambda index: dataset.__getitems__([index])[0]
    return lambda index: dataset[index]


def build(target: str, board: Board) -> tuple[Any, Construction]:
    """Build the dataset and describe it. It is None if its constructor raised, or if it has no length.

    Raises:
        CommandError: The target can't be found.
    """
    board.enter(Phase.IMPORTING)
    began_s = time.perf_counter()
    find_target(target)
    set_num_threads(1)  # as in the loader's processes: torch's threads would outlive the constructor
    import_s = time.perf_counter() - began_s
    board.enter(Phase.BUILDING)
    before = hazards_now()
    seed_for_construction(Rng.SAMPLE)
    began_s = time.perf_counter()
    try:
        dataset = without_loader(made_by(target))
        lengths, length_error = _lengths(dataset)
    except (Exception, SystemExit) as error:
        text = "".join(traceback.format_exception_only(error.__cause__ or error)).strip()
        return None, Construction("", import_s, 0.0, (), "", "", (), (), None, error=text[:_MAX_TEXT])
    build_s = time.perf_counter() - began_s
    hazards, library_threads = hazards_since(before)
    board.enter(Phase.LOOKING)
    construction = Construction(
        type_name(dataset),
        import_s,
        build_s,
        lengths,
        length_error,
        hazards,
        library_threads,
        holders_of(dataset),
        unsendable_part(dataset),
    )
    return (None if length_error else dataset), construction


def _lengths(dataset: Any) -> tuple[tuple[int, ...], str]:
    if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__getitems__"):
        return (), f"a {type_name(dataset)} has no __getitem__"
    try:
        return tuple(len(dataset) for _ in range(_NUM_LENGTHS)), ""
    except Exception as error:
        return (), f"len(dataset) raised {type(error).__name__}: {error}"[:_MAX_TEXT]


def describe_failure(index: int, error: BaseException) -> Failure:
    """Return what a sample raised, and where."""
    stack = [
        Line(frame.filename, frame.lineno or 0, frame.name)
        for frame in reversed(traceback.extract_tb(error.__traceback__))
    ]
    users = [line for line in stack if is_users_file(line.file)]
    text = "".join(traceback.format_exception_only(error)).strip()
    return Failure(index, text[:_MAX_TEXT], type(error).__name__, as_shown(line_of(users, is_users_file)))
