from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swift_loader.integrations.tensorboard import write_metrics, write_report
from tests.support.fonts import open_fonts
from tests.support.measured import MeasuredLoader

pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True, scope="module")
def _fonts() -> None:
    open_fonts()


class Written:
    """Has a SummaryWriter's methods, and keeps what is written."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[Any, ...]] = {}

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        self.calls[tag] = (scalar_value, global_step)

    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None, *, dataformats: str) -> None:
        self.calls["image"] = (tag, img_tensor, global_step, dataformats)

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        self.calls["text"] = (tag, text_string, global_step)


def test_each_metric_is_a_scalar() -> None:
    loader, writer = MeasuredLoader(), Written()
    write_metrics(writer, loader, 7, prefix="val/")
    assert writer.calls == {name: (value, 7) for name, value in loader.metrics(prefix="val/").items()}


def test_the_report_is_a_picture_and_a_text() -> None:
    writer = Written()
    write_report(writer, MeasuredLoader(), 3)
    tag, picture, step, layout = writer.calls["image"]
    assert (tag, step, layout) == ("swift_loader/report", 3, "HWC")
    assert picture.dtype == np.uint8
    assert picture.ndim == 3
    assert picture.shape[2] == 3
    assert all(line.startswith("    ") for line in writer.calls["text"][1].splitlines())


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_what_torchs_writer_wrote(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    loader = MeasuredLoader()
    with SummaryWriter(str(tmp_path)) as writer:
        write_metrics(writer, loader, 5)
        write_report(writer, loader, 5)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(loader.metrics())
    (scalar,) = events.Scalars("swift_loader/batches_total")
    assert (scalar.step, scalar.value) == (5, 100)
    assert events.Tags()["images"] == ["swift_loader/report"]
