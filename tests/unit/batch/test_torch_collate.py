from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data._utils.worker as torch_worker
from hypothesis import HealthCheck, given, settings
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from swift_loader.batch.collate import _memory, torch_collate, use_in_default_collate
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.codec import encode
from tests.support.helpers import exhaustive
from tests.support.memories import MEMORIES, arena
from tests.support.torch_samples import batches_of_samples, outcome

pytestmark = pytest.mark.filterwarnings("ignore")

WORKER_INFO = torch_worker.WorkerInfo(id=0, num_workers=1, seed=1, dataset=torch.utils.data.Dataset())

TORCHS = dict(default_collate_fn_map)
"""torch's own functions."""


@pytest.fixture(params=[False, True], ids=["trainer", "worker"], scope="module")
def place(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setattr(torch_worker, "_worker_info", WORKER_INFO)
        yield


def is_for_ours_only(expected: tuple[Any, ...]) -> bool:
    """Whether torch refused a conjugated or negated view: it has no shared memory for them, and ours needs none."""
    return "doesn't correspond to a device" in str(expected[1])


def assert_alike(samples: list[Any]) -> None:
    expected = outcome(default_collate, samples)
    if is_for_ours_only(expected):
        return
    for memory in (None, *(make() for make in MEMORIES)):
        found = outcome(lambda batch, memory=memory: torch_collate(batch, memory), samples)  # type: ignore[misc]
        assert found == expected, samples


@pytest.mark.usefixtures("place")
@given(samples=batches_of_samples())
@settings(max_examples=100, deadline=None)
def test_any_samples_give_what_torch_gives(samples: list[Any]) -> None:
    assert_alike(samples)


MIXTURES: list[Any] = [
    [],
    [torch.zeros(3), torch.zeros(2)],
    [torch.zeros(2), torch.zeros(3)],
    [torch.zeros(2), torch.zeros(2, dtype=torch.float64)],
    [torch.zeros(100, 100), torch.zeros(100, 100, dtype=torch.float64)],
    [torch.zeros(2, dtype=torch.int64), torch.zeros(2)],
    [torch.zeros(100, 100, requires_grad=True)] * 2,
    [torch.zeros(100, 100), torch.zeros(100, 100, requires_grad=True)],
    [torch.zeros(100, 100), np.zeros((100, 100))],
    [torch.zeros(100, 100), 1],
    [np.zeros(2), [0, 0]],
    [np.zeros(2), np.zeros(3)],
    [np.ones(1)[::-1]] * 2,
    [1] * 40 + [True],
    [True] * 40,
    [1] * 40 + [1.5],
    [1.5] * 40 + [1],
    [2**63] * 40,
    [np.uint64(1)] * 40,
    [np.float64(0.1)] * 40,
    [np.longdouble(1)] * 40,
    [np.timedelta64(1, "s")] * 40,
    [np.float32(1)] * 40 + [np.float64(1)],
    [(1, 2), (1,)],
    [{"a": 1}, {"b": 1}],
    [None, None],
    ["a", b"b"],
]


@pytest.mark.usefixtures("place")
def test_mistakes_and_mixtures_give_what_torch_gives() -> None:
    for samples in MIXTURES:
        assert_alike(samples)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("shape", [(2,), (100, 100)])
def test_conjugated_and_negated_views_are_stacked_also_in_a_worker(shape: tuple[int, ...]) -> None:
    conjugated = torch.full(shape, 1 + 2j).conj()
    for view in (conjugated, conjugated.imag):
        assert torch.equal(torch_collate([view] * 3, arena()), torch.stack([view] * 3))


@pytest.mark.parametrize("leaf", [1, True, 1.5, np.float32(1), exhaustive(np.ones(2))], ids=repr)
def test_the_default_device_is_where_torch_puts_numbers_and_arrays(
    leaf: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch makes that folder for meta tensors
    with torch.device("meta"):
        for num_samples in (2, 40):
            expected = default_collate([leaf] * num_samples)
            batch = torch_collate([leaf] * num_samples, arena())
            assert (batch.device, batch.dtype, batch.shape) == (expected.device, expected.dtype, expected.shape)


@pytest.mark.parametrize(("num_samples", "shape"), [(2, (3,)), (40, (100, 100))])
def test_a_batch_is_made_in_the_memory_and_not_copied_again(num_samples: int, shape: tuple[int, ...]) -> None:
    sample = {"x": torch.ones(shape), "y": (np.ones(shape, np.uint8), 1, True, 0.5, np.int16(3)), "z": [torch.ones(())]}
    memory = arena()
    batch = torch_collate([sample] * num_samples, memory)
    used = memory.used
    tensors = [batch["x"], *batch["y"], *batch["z"]]
    assert all(memory.find(tensor) is not None for tensor in tensors)
    encode(batch, memory, Definitions())
    assert memory.used == used


# What the user registered ---------------------------------------------------------------------------------------------


@pytest.fixture
def functions() -> Iterator[dict[Any, Any]]:
    """torch's map of collate functions, which is as before after the test."""
    before = dict(default_collate_fn_map)
    yield default_collate_fn_map
    default_collate_fn_map.clear()
    default_collate_fn_map.update(before)


class Box:
    """A type that torch doesn't collate."""

    def __init__(self, content: Any) -> None:
        self.content = content


class LargeBox(Box):
    """A subclass."""


def collate_boxes(batch: Sequence[Box], *, collate_fn_map: Any = None) -> Box:
    return Box(collate([box.content for box in batch], collate_fn_map=collate_fn_map))


@pytest.mark.parametrize("key", [Box, (Box, frozenset)])
def test_a_registered_type_is_collated_by_its_function_and_its_content_by_ours(key: Any, functions: Any) -> None:
    functions[key] = collate_boxes
    memory = arena()
    batch = torch_collate([LargeBox({"x": torch.ones(2)})] * 2, memory)
    assert type(batch) is Box
    assert torch.equal(batch.content["x"], torch.ones(2, 2))
    assert memory.find(batch.content["x"]) is not None


def test_a_function_registered_for_tensors_gets_arrays_too(functions: Any) -> None:
    functions[torch.Tensor] = lambda batch, *, collate_fn_map: len(batch)  # noqa: PLW0108
    for samples in ([torch.ones(2)] * 2, [np.ones(2)] * 3, [np.ones(2), np.ones(3)]):
        assert torch_collate(samples, arena()) == default_collate(samples) == len(samples)


def test_functions_are_tried_in_the_order_of_their_registration(functions: Any) -> None:
    functions[Box] = lambda batch, *, collate_fn_map: "box"
    functions[LargeBox] = lambda batch, *, collate_fn_map: "large box"
    functions[object] = lambda batch, *, collate_fn_map: "object"
    things: list[Any] = [Box(1), LargeBox(1), type("Other", (LargeBox,), {})(1), None, {}, [1], 1]
    for thing in things:
        assert outcome(torch_collate, [thing] * 2) == outcome(default_collate, [thing] * 2)


# torch's own default_collate in a worker ------------------------------------------------------------------------------


@pytest.fixture
def in_worker(monkeypatch: pytest.MonkeyPatch, functions: Any) -> Any:
    monkeypatch.setattr(torch_worker, "_worker_info", WORKER_INFO)
    use_in_default_collate()
    return functions


SAMPLES = [{"x": torch.ones(2), "y": (np.ones(2), 1)}] * 40


@pytest.mark.usefixtures("in_worker")
@given(samples=batches_of_samples())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_torchs_function_gives_what_it_gave_before(samples: list[Any]) -> None:
    token = _memory.set(arena())
    batch = outcome(default_collate, samples)
    _memory.reset(token)
    expected = outcome(lambda each: collate(each, collate_fn_map=TORCHS), samples)
    assert is_for_ours_only(expected) or batch == expected
