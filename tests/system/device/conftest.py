"""Loaders of a fake device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from swift_loader import SwiftLoader
from swift_loader.device.move import Target
from swift_loader.device.pinning import CudaRegistry, PageLock
from swift_loader.device.streams import CopyStream, Transfer
from tests.support.datasets import Blocks
from tests.support.device_loaders import BATCH_SIZE, Start
from tests.support.fake_device import FakeDevice, Registry
from tests.support.helpers import make_loader


@pytest.fixture
def start_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return what starts a loader whose batches go to a fake device."""
    started: list[SwiftLoader] = []

    def start(
        device: FakeDevice,
        *,
        move: Callable[[Any], Any] | None = None,
        registry: Registry | None = None,
        **options: Any,
    ) -> SwiftLoader:
        class FakeTarget(Target):
            moves, moves_in_background = True, False  # type: ignore[assignment]

            def on_arrival(self, notices: deque[str], *, is_locked: bool) -> None:
                return None

            def make_page_lock(self, notices: deque[str]) -> PageLock:
                return PageLock(cast(CudaRegistry, registry or Registry()), notices)

            def make_stream(self) -> CopyStream:
                return device

            def move(self, batch: Any, transfer: Transfer) -> Any:
                moved = (move or device.copy)(batch)
                transfer.parts.append(moved)
                return moved

        target = FakeTarget(None, None, None)
        monkeypatch.setattr("swift_loader.loader.find_target", lambda *_, **__: target)
        loader = make_loader(Blocks, batch_size=BATCH_SIZE, **{"shuffle": False, **options})
        started.append(loader)
        loader.start()
        return loader

    yield start
    for loader in started:
        loader.close()
