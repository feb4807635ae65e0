"""The check whether an object can be sent, without sending it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from swift_loader.transport.dry_run import DryRunPickler
from tests.support.datasets import Counting


def tried(thing: object, known: tuple[object, ...] = ()) -> DryRunPickler:
    dry_run = DryRunPickler(lambda other: any(other is one for one in known))
    dry_run.dump(thing)
    return dry_run


def local_class() -> type:
    class Local:
        def __init__(self) -> None:
            self.x = 3

    return Local


def fail(self: object = None) -> Any:
    raise RuntimeError("it refuses")


def test_code_that_must_be_sent_is_found_unless_the_receiver_has_it() -> None:
    local = local_class()
    assert tried([local, fail]).found == [local]
    assert tried([local, fail], known=(local,)).found == []
    assert tried(local()).found == [local]


@pytest.mark.parametrize("thing", [3, "text", {"a": [1, (2, None)]}, np.zeros(3), Counting, len])
def test_containers_arrays_and_importable_code_run_no_code_of_the_script(thing: object) -> None:
    dry_run = tried(thing)
    assert (dry_run.runs_code, dry_run.found) == (False, [])


@pytest.mark.parametrize("make", [local_class(), lambda: np.array([local_class()()], object)])
def test_objects_run_code(make: Callable[[], object]) -> None:
    assert tried(make()).runs_code


def test_a_member_of_a_local_enum_needs_its_class() -> None:
    class Color(Enum):
        RED = 1

    assert tried(Color.RED).found == [Color]
    assert tried(Color.RED, known=(Color,)).found == []


def test_what_cannot_be_sent_raises() -> None:
    local = local_class()
    local.__reduce__ = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="it refuses"):
        tried(local())
    with pytest.raises(TypeError, match="a thread that has been started can't be sent"):
        tried(threading.current_thread())
    with pytest.raises(TypeError, match="requires grad and isn't a leaf"):
        tried(torch.ones(2, requires_grad=True) * 2)
