"""TensorBoard: writes a loader's metrics as scalars, and its report as a picture and a text.

Takes any writer with the methods of `torch.utils.tensorboard.SummaryWriter`, so it imports no library itself.
"""

from __future__ import annotations

from typing import Any, Protocol

from swift_loader.integrations.figures import HasMetrics, HasReport
from swift_loader.report.plots import pixels

__all__ = ["Writer", "write_metrics", "write_report"]


class Writer(Protocol):
    """A `SummaryWriter`, of torch or of tensorboardX."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None: ...  # noqa: D102
    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None, *, dataformats: str) -> None: ...  # noqa: D102
    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None: ...  # noqa: D102


def write_metrics(writer: Writer, loader: HasMetrics, step: int, prefix: str = "swift_loader/") -> None:
    """Write the loader's metrics at a step. Each key begins with `prefix`, whose first part is TensorBoard's group."""
    for name, value in loader.metrics(prefix=prefix).items():
        writer.add_scalar(name, value, step)


def write_report(writer: Writer, loader: HasReport, step: int, tag: str = "swift_loader/report") -> None:
    """Write the loader's report at a step, for example once an epoch: takes a second or two.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
        ValueError: The loop has got no batch yet.
    """
    report = loader.report()
    writer.add_image(tag, pixels(report), step, dataformats="HWC")
    writer.add_text(tag, "    " + str(report).replace("\n", "\n    "), step)
