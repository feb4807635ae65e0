"""A loader's figures for dashboards: one flat dict of floats. Pure, and fast enough to be asked for at every step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swift_loader.metrics.observations import Observations, are_of_one_pass

__all__ = ["NAMES", "TOTALS", "WINDOW", "flat_metrics"]

WINDOW = 512
"""Batches that make up the recent past."""

TOTALS = ("batches_total", "samples_total", "waited_s_total", "elapsed_s_total", "restarts_total")
"""Figures that only grow, since the loader started."""

_FIGURES = ("batches_per_s", "samples_per_s", "wait_share", "ready_mean", "num_workers")
_STAGES = ("fetch", "collate", "encode", "transport", "decode", "wait")
_SHARES = (0.5, 0.99)
_QUANTILES = tuple(f"{stage}_ms_{name}" for stage in _STAGES for name in ("p50", "p99"))

NAMES = (*_FIGURES, *_QUANTILES, *TOTALS)
"""All keys, without the prefix."""


def flat_metrics(observations: Observations | None, prefix: str = "swift_loader/") -> dict[str, float]:
    """Return figures of the last 512 batches, and counts since the loader started.

    The keys are always the same. Without any batch, the figures are 0.

    Args:
        observations: What was measured. None: the loader hasn't started.
        prefix: What each key begins with.
    """
    if observations is None:
        return dict.fromkeys((prefix + name for name in NAMES), 0.0)
    batches = observations.batches[-WINDOW:]
    run_ns, waited_ns = _run_ns(batches)
    figures = (
        _ratio(len(batches), run_ns / 1e9),
        _ratio(int(batches["num_samples"].sum()), run_ns / 1e9),
        _ratio(waited_ns, run_ns),
        _ratio(int(batches["num_ready"].sum()), len(batches)),
        observations.setup.num_workers,
        *_quantiles(batches),
        observations.num_delivered,
        observations.num_samples,
        observations.waited_s,
        observations.elapsed_s,
        observations.num_restarts,
    )
    return {prefix + name: float(figure) for name, figure in zip(NAMES, figures, strict=True)}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _run_ns(batches: NDArray[np.void]) -> tuple[int, int]:
    """Return how long the loop ran over these batches, and how long of that it waited.

    It ran from asking for the first to getting the last. Time between two passes doesn't count.
    """
    if not len(batches):
        return 0, 0
    asked, delivered = batches["asked_ns"], batches["delivered_ns"]
    lasts = np.flatnonzero(~are_of_one_pass(batches))
    between = int((asked[lasts + 1] - delivered[lasts]).sum())
    return int(delivered[-1] - asked[0]) - between, int((delivered - asked).sum())


def _quantiles(batches: NDArray[np.void]) -> list[float]:
    """Return quantiles of each stage in milliseconds. Each is a time that a batch had, not one between two."""
    if not len(batches):
        return [0.0] * len(_QUANTILES)
    times = np.empty((len(_STAGES), len(batches)), np.int64)
    for row, stage in zip(times, _STAGES, strict=True):
        _fill(row, batches, stage)
    times.sort(axis=1)
    places = [int(share * (len(batches) - 1) + 0.5) for share in _SHARES]
    quantiles: list[float] = (times[:, places] / 1e6).ravel().tolist()
    return quantiles


def _fill(row: NDArray[np.int64], batches: NDArray[np.void], stage: str) -> None:
    if stage == "wait":
        np.subtract(batches["delivered_ns"], batches["asked_ns"], out=row)
    elif stage == "transport":
        built = batches["began_ns"] + batches["fetch_ns"] + batches["collate_ns"] + batches["encode_ns"]
        np.subtract(batches["received_ns"], built, out=row)
        row[(batches["began_ns"] == 0) | (row < 0)] = 0  # not measured
    else:
        row[:] = batches[f"{stage}_ns"]
