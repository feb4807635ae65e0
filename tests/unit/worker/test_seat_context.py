"""What is global in a process is put back as it was, for each of several loaders."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data._utils import collate, worker

from swift_loader.worker.generators import GeneratorStates, preserved_generators
from swift_loader.worker.seat_context import SeatContext


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    functions, dtype = dict(collate.default_collate_fn_map), torch.get_default_dtype()
    with preserved_generators():
        yield
    collate.default_collate_fn_map.clear()
    collate.default_collate_fn_map.update(functions)
    torch.set_default_dtype(dtype)
    worker._worker_info = None


def drawn() -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        *torch.rand(3).tolist(),
        torch.randn(1).item(),
    ]


def test_generators_continue_where_they_were_also_between_two_normal_numbers() -> None:
    random.gauss(0, 1), np.random.randn(), torch.randn(1)  # each makes two at a time
    states = GeneratorStates.take()
    wanted = drawn()
    drawn()
    for _ in range(2):
        states.restore()
        assert drawn() == wanted


def test_a_bit_generator_of_the_user_belongs_to_its_seat() -> None:
    usual = np.random.get_bit_generator()  # type: ignore[attr-defined]
    before = GeneratorStates.take()
    np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
    try:
        own = GeneratorStates.take()
        wanted = np.random.rand(2).tolist()
        before.restore()
        assert np.random.get_bit_generator() is usual  # type: ignore[attr-defined]
        own.restore()
        assert np.random.rand(2).tolist() == wanted
    finally:
        np.random.set_bit_generator(usual)  # type: ignore[attr-defined]


def test_two_seats_take_turns_and_none_sees_the_other() -> None:
    class Own:
        """The first seat's."""

    fresh = SeatContext.take()
    torch.set_default_dtype(torch.float64)
    info: Any = "of the first"
    worker._worker_info = info
    collate.default_collate_fn_map[Own] = list
    random.seed(1)
    first = SeatContext.take()
    wanted = drawn()
    fresh.restore()
    assert (torch.get_default_dtype(), worker._worker_info) == (torch.float32, None)
    assert Own not in collate.default_collate_fn_map
    drawn()
    first.restore()
    assert (torch.get_default_dtype(), worker._worker_info) == (torch.float64, info)
    assert collate.default_collate_fn_map[Own] is list
    assert drawn() == wanted
