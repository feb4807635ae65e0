"""Whether copies hide behind a training step: time per step, on batches that are there already and on loaded ones.

The model is a chain of matrix products, deep enough that a step takes much longer than the copy of a batch, trained by
gradient descent. What is timed begins and ends with an idle device. There are four cases:

- idle/async: the loop never waits for the device. Target: at most 1.01 of a step on resident batches.
- idle/sync: the loop waits for each step, `loss.item()`, as many do. Target: at most 1.02.
- busy/async, busy/sync: the same with a busy process for each core, which the loaders' processes and the loop's own
  thread must share the machine with.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from common.datasets import Images
from common.report import Result
from common.turns import measure_in_turns, table_with_ratios
from torch import nn

from gpu.accelerator import Accelerator
from gpu.feeds import Feed, resident_feed, swift_feed, swift_loader_of, torch_feed, torch_loader_of
from gpu.load import busy_cores
from gpu.outcome import Outcome, Target, paired_ratios
from gpu.scale import Scale

_TARGETS = {
    "async": Target("swift_loader / resident", at_most=1.01),
    "sync": Target("swift_loader / resident", at_most=1.02),
}
_LOADS = {"idle": nullcontext, "busy": busy_cores}
_PATCH = 16
_NUM_BATCHES = 500
"""Per epoch, so that the ends of epochs hardly show."""
_NUM_RESIDENT = 4
_LEARNING_RATE = 1e-6
_NUM_TRIED = 5
"""Steps that the choice of the depth goes by."""


def measure_step(accelerator: Accelerator, scale: Scale) -> Outcome:
    """Return milliseconds per step for each loader, waiting for each step or not, on an idle machine and a busy one."""
    step = _step_of_length(accelerator, scale)
    feeds: dict[str, Feed] = {}
    results: list[Result] = []
    try:
        _start_feeds(feeds, accelerator, scale)
        for load, context in _LOADS.items():
            with context():
                for loop in _TARGETS:
                    systems: dict[str, Callable[[], float]] = {
                        name: partial(_time_step, accelerator, scale, step, feed, waits=loop == "sync")
                        for name, feed in feeds.items()
                    }
                    results += measure_in_turns(f"{load}/{loop}", "ms/step", systems, scale.rounds)
    finally:
        for feed in feeds.values():
            feed.close()
    verdicts = []
    for case in dict.fromkeys(result.case for result in results):
        ratios = paired_ratios(results, case, "swift_loader", "resident")
        verdicts.append(f"{case}, {_TARGETS[case.partition('/')[2]].judge(ratios, accelerator)}")
    title = f"{step.depth} layers of width {scale.model_width} in {accelerator.dtype}, {scale.num_workers} workers"
    return Outcome("\n".join([title, table_with_ratios(results, "resident"), *verdicts]), results)


class TrainingStep:
    """Forward, backward and update, on a batch of images that is on the device."""

    def __init__(self, accelerator: Accelerator, width: int, depth: int) -> None:
        self.depth = depth
        self._dtype = accelerator.dtype
        layers: list[nn.Module] = [nn.Conv2d(3, width, _PATCH, _PATCH), nn.Flatten(2), _Transposed()]
        for _ in range(depth):
            layers += [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
        self._model = nn.Sequential(*layers).to(accelerator.device, accelerator.dtype)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Queue a step on `(B, 3, H, W) uint8`, without waiting for it; return the loss."""
        loss = self._model(images.to(self._dtype) / 255).float().square().mean()
        loss.backward()
        with torch.no_grad():  # torch.optim imports torch's compiler, which takes seconds
            for parameter in self._model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=_LEARNING_RATE)
                parameter.grad = None
        return loss.detach()


class _Transposed(nn.Module):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return `(B, tokens, width)` of `(B, width, tokens)`."""
        return features.transpose(1, 2)


def _step_of_length(accelerator: Accelerator, scale: Scale) -> TrainingStep:
    """Return a step with as many layers as it takes."""
    if scale.max_model_depth == 1:
        return TrainingStep(accelerator, scale.model_width, 1)
    (images,) = _resident_images(accelerator, scale, 1)
    flat, deep = (_try_depth(accelerator, scale, depth, images) for depth in (1, 5))
    per_layer = max((deep - flat) / 4, 1e-6)
    depth = 1 + round((scale.step_s - flat) / per_layer)
    return TrainingStep(accelerator, scale.model_width, min(max(depth, 1), scale.max_model_depth))


def _try_depth(accelerator: Accelerator, scale: Scale, depth: int, images: torch.Tensor) -> float:
    step = TrainingStep(accelerator, scale.model_width, depth)
    for _ in range(2):
        seconds = _seconds(accelerator, lambda: step(images), _NUM_TRIED)
    return seconds / _NUM_TRIED


def _start_feeds(feeds: dict[str, Feed], accelerator: Accelerator, scale: Scale) -> None:
    """Add the feeds to a dict, one by one, so that those that did start can be closed."""
    make_dataset = partial(Images, length=_NUM_BATCHES * scale.batch_size, num_distinct=scale.num_distinct)
    feeds["resident"] = resident_feed(_resident_images(accelerator, scale, _NUM_RESIDENT))
    loader = swift_loader_of(make_dataset, scale.batch_size, scale.num_workers)
    feeds["swift_loader"] = swift_feed(loader, accelerator)
    to_device = partial(torch.Tensor.to, device=accelerator.device, non_blocking=True)
    feeds["torch"] = torch_feed(
        torch_loader_of(accelerator, make_dataset(), scale.batch_size, scale.num_workers), to_device
    )


def _resident_images(accelerator: Accelerator, scale: Scale, count: int) -> list[torch.Tensor]:
    shape = (scale.batch_size, 3, 224, 224)
    return [torch.randint(0, 256, shape, dtype=torch.uint8, device=accelerator.device) for _ in range(count)]


def _time_step(accelerator: Accelerator, scale: Scale, step: TrainingStep, feed: Feed, *, waits: bool) -> float:
    """Return milliseconds per step, when what was ready before the turn is used up."""

    def take_step() -> None:
        loss = step(feed.take())
        if waits:
            loss.item()

    _seconds(accelerator, take_step, scale.num_uncounted_steps)
    return _seconds(accelerator, take_step, scale.num_steps) / scale.num_steps * 1000


def _seconds(accelerator: Accelerator, work: Callable[[], None], count: int) -> float:
    accelerator.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        work()
    accelerator.synchronize()
    return time.perf_counter() - begin
