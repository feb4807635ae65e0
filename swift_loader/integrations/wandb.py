"""Weights & Biases: logs a loader's metrics, and its report as a picture.

run = wandb.init()
...
log_metrics(run, loader)
run.log({"loss": loss})
"""

from __future__ import annotations

from typing import Any

from swift_loader.integrations.figures import HasMetrics, HasReport
from swift_loader.report.plots import pixels

__all__ = ["log_metrics", "log_report"]


def log_metrics(run: Any, loader: HasMetrics, step: int | None = None, prefix: str = "swift_loader/") -> None:
    """Add the loader's metrics to a run's present step, which your next `run.log` commits.

    Args:
        run: What `wandb.init` returned.
        loader: Whose metrics.
        step: The step, if you give it to your own `run.log`, too.
        prefix: What each key begins with. Its first part is the section in W&B's workspace.
    """
    run.log(loader.metrics(prefix=prefix), step=step, commit=False)


def log_report(run: Any, loader: HasReport, step: int | None = None, key: str = "swift_loader/report") -> None:
    """Add the loader's report to a run's present step, as a picture. Takes a second or two.

    Raises:
        ModuleNotFoundError: W&B or matplotlib is missing.
        ValueError: The loop has got no batch yet.
    """
    try:
        from wandb import Image
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "swift_loader.integrations.wandb needs Weights & Biases: pip install wandb", name="wandb"
        ) from error
    report = loader.report()
    run.log({key: Image(pixels(report), caption=str(report).partition("\n")[0])}, step=step, commit=False)
