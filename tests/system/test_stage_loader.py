"""StageLoader's parameters and what they do; beside SPDL's DataLoader where that is installed."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from swift_loader import DevicePrefetcher
from swift_loader.pipeline import StageLoader
from tests.support import stage_functions as functions
from tests.support.stage_functions import AsyncNumbers, Numbers


def spdl_loader(*arguments: Any, **options: Any) -> Any:
    from spdl.dataloader import DataLoader

    return DataLoader(*arguments, **options)


CLASSES = [
    pytest.param(StageLoader, id="swift_loader"),
    pytest.param(spdl_loader, id="spdl", marks=pytest.mark.skipif(not find_spec("spdl"), reason="no SPDL")),
]

both = pytest.mark.parametrize("loader_class", CLASSES)


@both
@pytest.mark.parametrize("source", [list(range(9)), Numbers(9), AsyncNumbers(9)], ids=["list", "iterable", "async"])
def test_src_is_any_iterable_or_async_iterable(loader_class: Any, source: Any) -> None:
    assert sorted(loader_class(source)) == list(range(9))


@both
@pytest.mark.parametrize("output_order", ["input", "completion"])
def test_preprocessor_is_a_function_or_coroutine(loader_class: Any, output_order: str) -> None:
    for function in (functions.plus_one, functions.async_plus_one):
        got = list(loader_class(range(30), preprocessor=function, output_order=output_order))
        assert (got if output_order == "input" else sorted(got)) == list(range(1, 31))


@both
def test_preprocessor_is_a_generator_or_async_generator(loader_class: Any) -> None:
    expected = sorted(pair for number in range(30) for pair in functions.some(number))
    for function in (functions.some, functions.async_some):
        assert sorted(loader_class(range(30), preprocessor=function)) == expected


def odd(number: int) -> int | None:
    return number if number % 2 else None


async def total(numbers: list[int]) -> int:
    return sum(numbers)


CASES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "preprocessor is a dict to look items up": ({"preprocessor": dict(enumerate("abcdefg"))}, list("abcdefg")),
    "a result that is None is left out": ({"preprocessor": odd, "batch_size": 2, "aggregator": sum}, [4, 5]),
    "batch_size makes lists": ({"batch_size": 3}, [[0, 1, 2], [3, 4, 5], [6]]),
    "drop_last leaves the rest out": ({"batch_size": 3, "drop_last": True}, [[0, 1, 2], [3, 4, 5]]),
    "aggregator gets lists": ({"batch_size": 4, "aggregator": sum}, [6, 15]),
    "aggregator is a coroutine": ({"batch_size": 4, "aggregator": total}, [6, 15]),
    "aggregator without batch_size gets items": ({"aggregator": functions.plus_one}, list(range(1, 8))),
}


@both
@pytest.mark.parametrize("case", CASES)
def test_each_parameter_does_as_in_spdl(loader_class: Any, case: str) -> None:
    options, expected = CASES[case]
    loader = loader_class(range(7), output_order="input", **options)
    assert [list(loader) for _ in range(2)] == [expected] * 2


@both
def test_transfer_fn_runs_alone_and_in_one_thread(loader_class: Any) -> None:
    threads: set[int] = set()
    running = threading.Semaphore(1)

    def transfer(number: int) -> int:
        assert running.acquire(blocking=False)
        threads.add(threading.get_ident())
        time.sleep(0.001)
        running.release()
        return -number

    got = list(loader_class(range(20), preprocessor=functions.plus_one, transfer_fn=transfer, output_order="input"))
    assert got == [-number for number in range(1, 21)]
    assert threads.isdisjoint({threading.get_ident()})
    if loader_class is StageLoader:
        assert len(threads) == 1


@both
@pytest.mark.parametrize("num_threads", [1, 3])
def test_num_threads_run_at_the_same_time(loader_class: Any, num_threads: int) -> None:
    running = most = 0
    lock = threading.Lock()

    def work(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.005)
        with lock:
            running -= 1
        return number

    assert sorted(loader_class(range(30), preprocessor=work, num_threads=num_threads)) == list(range(30))
    assert most == num_threads


@both
def test_buffer_size_bounds_what_is_pulled_ahead(loader_class: Any) -> None:
    pulled: list[int] = []

    def source() -> Iterator[int]:
        for number in range(10_000):
            pulled.append(number)
            yield number

    iterator = iter(loader_class(source(), preprocessor=functions.plus_one, buffer_size=2, num_threads=2))
    next(iterator)
    time.sleep(0.2)  # to pull as much as it will
    assert len(pulled) < 40
    del iterator


@both
def test_timeout_limits_the_wait_for_an_item(loader_class: Any, released: threading.Event) -> None:
    loader = loader_class(range(5), preprocessor=functions.hanging_at(2, released), num_threads=1, timeout=0.3)
    releaser = threading.Timer(3.0, released.set)  # SPDL's waits for its threads
    releaser.start()
    with pytest.raises(TimeoutError):
        list(loader)
    releaser.cancel()


@pytest.mark.parametrize("stage", ["preprocessor", "aggregator", "transfer_fn"])
def test_nothing_is_dropped_silently(stage: str) -> None:
    def fail(value: Any) -> Any:
        raise LookupError(stage)

    options: dict[str, Any] = {"batch_size": 2, stage: fail}
    loader = StageLoader(range(6), **options)
    with pytest.raises(LookupError, match=stage):
        list(loader)


def test_wrong_arguments_are_refused() -> None:
    async def transfer(value: Any) -> Any:
        return value

    async def stream(value: Any) -> AsyncIterator[Any]:
        yield value

    for wrong in (transfer, stream):
        with pytest.raises(TypeError, match="must be a plain function"):
            StageLoader([], transfer_fn=wrong)
    with pytest.raises(ValueError, match="num_threads=0"):
        StageLoader([], num_threads=0)
    with pytest.raises(ValueError, match="buffer_size=0"):
        StageLoader([], buffer_size=0)
    with pytest.raises(ValueError, match="output_order='random'"):
        StageLoader([], output_order="random")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="threads"):
        StageLoader([], threads=3)  # type: ignore[call-arg]


def test_a_device_prefetcher_takes_it_and_resumes() -> None:
    def make() -> DevicePrefetcher:
        options: dict[str, Any] = {"batch_size": 4, "aggregator": torch.tensor, "output_order": "input"}
        return DevicePrefetcher(StageLoader(range(24), **options), "cpu")

    expected = [list(range(first, first + 4)) for first in range(0, 24, 4)]
    loader = make()
    assert len(loader) == 6
    iterator = iter(loader)
    found = [next(iterator).tolist() for _ in range(2)]
    state = loader.state_dict()
    loader.close()
    resumed = make()
    resumed.load_state_dict(state)
    assert found + [batch.tolist() for batch in resumed] == expected


def test_it_shows_its_stages() -> None:
    loader = StageLoader(range(4), preprocessor=functions.plus_one, batch_size=2)
    assert repr(loader).startswith("StageLoader: 2 results, not started\n  source range\n  map plus_one, 8 threads")
