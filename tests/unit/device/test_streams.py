"""What a side stream is told, by a fake of torch's module for a device; and how often a batch is searched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from swift_loader.device import accelerator, move, streams
from swift_loader.device.streams import AcceleratorStream, CopiesInFlight
from swift_loader.scheduler.delivery import Delivery
from tests.support.fake_device import Moving

THERE = torch.device("meta", 0)


def moving(custom: Any = None) -> Moving:
    return Moving(move.Target(THERE, custom, None).move)


class FakeStream:
    def __init__(self, api: Api, name: str) -> None:
        self._api = api
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        self._api.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self._api.log.append(f"{self.name} waits for the event")

    def record_event(self, event: FakeEvent) -> FakeEvent:
        self._api.log.append(f"event on {self.name}")
        return event


class FakeEvent:
    def __init__(self, **options: Any) -> None:
        self.options = options

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class Api:
    """What torch.cuda is for CUDA: here for the device without memory, which stands for a GPU."""

    Event = FakeEvent

    def __init__(self) -> None:
        self.log: list[str] = []
        self._current = FakeStream(self, "loop")

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802
        return FakeStream(self, "side")

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_stream(self, device: torch.device) -> FakeStream:
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    fake = Api()
    monkeypatch.setattr(torch, "meta", fake, raising=False)
    for module in (accelerator, move, streams):
        monkeypatch.setattr(module, "streams_of", lambda kind: fake if kind == "meta" else None)

    def record_stream(tensor: torch.Tensor, stream: FakeStream) -> None:
        fake.log.append(f"{tuple(tensor.shape)} kept for {stream.name}")

    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    return fake


def test_what_was_copied_is_the_loops_after_the_event_and_its_memory_is_kept_for_it(api: Api) -> None:
    copies = CopiesInFlight(AcceleratorStream(THERE))
    issued = copies.issue(moving(), Delivery(batch={"x": torch.ones(2), "y": [torch.ones(3), "text"]}))
    assert api.log == ["event on side"]
    issued.hand_over()
    assert api.log[1:] == ["loop waits for the event", "(20,) kept for loop"], "the two are copied together"


def test_what_is_on_the_device_already_is_copied_on_the_loops_stream_before_the_copies(api: Api) -> None:
    copies = CopiesInFlight(AcceleratorStream(THERE))
    there = torch.empty(4, device=THERE)
    issued = copies.issue(moving(), Delivery(batch=[there, torch.ones(2)]))
    assert api.log == ["side waits for loop", "event on side"]
    assert issued.batch[0].device.type == "meta"
    assert issued.batch[0] is not there, "the source may write it again"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_function_of_ones_own_comes_after_what_its_batch_has_on_the_device(api: Api, is_there: bool) -> None:
    def to_device(batch: Any, device: torch.device) -> Any:
        api.log.append("moved")
        return [tensor.to(device) for tensor in batch]

    batch = [torch.ones(2), torch.empty(4, device=THERE if is_there else "cpu")]
    copies = CopiesInFlight(AcceleratorStream(THERE))
    copies.issue(moving(to_device), Delivery(batch=batch)).hand_over()
    waits = [entry for entry in api.log[: api.log.index("moved")] if entry == "side waits for loop"]
    assert bool(waits) is is_there
    assert api.log[-2:] == ["(2,) kept for loop", "(4,) kept for loop"]


def test_steps_are_marked_on_the_loops_stream(api: Api) -> None:
    copies = CopiesInFlight(AcceleratorStream(THERE))
    copies.begin_step()
    assert api.log == ["event on loop"]
