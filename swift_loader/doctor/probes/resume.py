"""The third process: runs a loader over some samples, stops it, resumes it, and compares every byte."""

from __future__ import annotations

from collections.abc import Callable

from swift_loader.doctor.facts import Resumed
from swift_loader.doctor.probes.board import Board, Phase, Request
from swift_loader.doctor.probes.some import Some
from swift_loader.doctor.probes.subject import SEED
from swift_loader.loader import SwiftLoader
from swift_loader.testing import assert_resume_exact

__all__ = ["resume"]

_NUM_WORKERS = 2
_BATCHES_PER_EPOCH = 4
_NUM_CUTS = 2
"""After the first and the third of four batches. Resumed with one worker, the fourth batch is then the worker's third
and its first, so that a dataset with a state of its own gives it another content at least once.
"""

_MAX_TEXT = 600


def resume(request: Request, board: Board, report: Callable[[object], None]) -> None:
    """Run the loader and report whether it resumes exactly."""
    error, is_mismatch = "", False
    try:
        assert_resume_exact(
            lambda: _loader(request, board, _NUM_WORKERS),
            resume_with=lambda: _loader(request, board, 1),
            num_batches=_BATCHES_PER_EPOCH,
            num_cuts=_NUM_CUTS,
        )
    except AssertionError as mismatch:
        error, is_mismatch = str(mismatch), True
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    text = " ".join(error.split())
    report(Resumed(len(request.indices), _NUM_WORKERS, _without_advice(text)[:_MAX_TEXT], is_mismatch))


def _without_advice(text: str) -> str:
    """Return an error without the advice for tests, which the findings give in other words."""
    return text.partition(". A sample must depend")[0]


def _loader(request: Request, board: Board, num_workers: int) -> SwiftLoader:
    board.enter(Phase.RUNNING)  # each loader is progress
    return SwiftLoader(
        Some,
        {"target": request.settings.target, "indices": list(request.indices)},
        batch_size=max(1, len(request.indices) // _BATCHES_PER_EPOCH),
        worker_per_consumer=num_workers,
        seed=SEED,
        nb_consumer=1,
        collate_fn=list,  # samples needn't have the same leaves here
        benchmark=False,
    )
