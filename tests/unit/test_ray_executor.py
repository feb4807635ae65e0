from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from swift_loader import DataLoader, RayExecutor, SwiftLoader
from tests.support.datasets import Counting

COUNTING: Any = Counting()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_workers": 0}, ValueError, "num_workers=0 is too small; it must be at least 1"),
        ({"num_workers": "many"}, TypeError, "it must be an integer"),
        ({"num_cpus": -1}, ValueError, "num_cpus=-1 isn't an amount; it must be a finite number"),
        ({"num_cpus": float("nan")}, ValueError, "num_cpus=nan isn't an amount"),
        ({"num_cpus": 1e-5}, ValueError, "Ray counts in steps of 0.0001"),
        ({"num_cpus": "1"}, TypeError, "it must be a number"),
        ({"memory": 0.5}, TypeError, "it must be an integer"),
        ({"resources": ["data"]}, TypeError, "resources is a list; it must be a dict, or None"),
        ({"resources": {"CPU": 1}}, ValueError, "use num_cpus and memory"),
        ({"resources": {"data": -1}}, ValueError, r"resources\['data'\]=-1 isn't an amount"),
        ({"resources": {1: 1}}, TypeError, "resources has the name 1, a int"),
        ({"resources": {"object_store_memory": 1}}, ValueError, "actors can't reserve"),
        ({"runtime_env": "env"}, TypeError, "runtime_env is a str; it must be a dict, or None"),
        ({"scheduling_strategy": "spread"}, ValueError, "must be one of 'SPREAD', 'DEFAULT'"),
        ({"scheduling_strategy": object()}, TypeError, "scheduling_strategy is a object"),
        ({"address": "local"}, ValueError, "address='local' is no cluster"),
        ({"address": "ray://head:10001"}, ValueError, "Ray Client"),
        ({"address": 6379}, TypeError, "address is a int; it must be a text, or None"),
        ({"placement_timeout": -1}, ValueError, "must be at least 0 seconds"),
        ({"placement_warning": "soon"}, TypeError, "must be a number of seconds"),
    ],
)
def test_a_wrong_option_is_refused_when_it_is_given(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        RayExecutor(**{"num_workers": 2, **options})


def test_it_says_what_an_actor_asks_for() -> None:
    assert RayExecutor(2).describe_need() == "1 CPU"
    wanted = RayExecutor(2, num_cpus=0.5, resources={"data": 1}, memory=10**9)
    assert wanted.describe_need() == "0.5 CPU, 1 data, 1000000000 bytes of memory"


def test_its_text_has_what_was_chosen_and_no_secrets_and_it_can_be_pickled() -> None:
    given = RayExecutor(4, num_cpus=2, runtime_env={"env_vars": {"TOKEN": "secret"}})
    assert repr(given) == "RayExecutor(num_workers=4, num_cpus=2.0)"
    assert pickle.loads(pickle.dumps(given)) == given


def test_a_loader_has_as_many_workers_as_its_executor() -> None:
    assert SwiftLoader(Counting, executor=RayExecutor(3)).worker_per_consumer == 3
    assert DataLoader(COUNTING, executor=RayExecutor(3)).num_workers == 3
    assert SwiftLoader(Counting).worker_per_consumer == 1


@pytest.mark.parametrize(
    "make", [lambda e: SwiftLoader(Counting, executor=e), lambda e: DataLoader(COUNTING, executor=e)]
)
def test_another_object_is_no_executor(make: Any) -> None:
    with pytest.raises(TypeError, match=r"executor is a int; it must be a swift_loader\.RayExecutor, or None"):
        make(4)


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        *[(SwiftLoader, one, "executor=") for one in ({"worker_per_consumer": "auto"}, {"worker_type": "thread"})],
        *[(DataLoader, {"num_workers": number}, "leave .* out") for number in (4, "auto")],
        (DataLoader, {"worker_type": "thread"}, "leave .* out"),
        (DataLoader, {"multiprocessing_context": "fork"}, "leave .* out"),
    ],
)
def test_a_loader_refuses_other_workers_beside_an_executor(make: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(Counting if make is SwiftLoader else COUNTING, executor=RayExecutor(2), **options)


def starting(**options: Any) -> None:
    with SwiftLoader(Counting, executor=RayExecutor(1, **options)) as loader:
        loader.start()


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match="pip install ray"):
        starting()


@pytest.mark.parametrize(
    ("is_client", "error", "text"),
    [(False, ConnectionError, r"call ray\.init\(\) before the loader starts"), (True, RuntimeError, "Ray Client")],
)
def test_a_cluster_that_cannot_be_used_is_an_error_that_says_what_to_do(
    is_client: bool, error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: True))
    fake = SimpleNamespace(is_initialized=lambda: is_client, util=SimpleNamespace(client=client))
    monkeypatch.setitem(sys.modules, "ray", fake)
    with pytest.raises(error, match=text):
        starting(address=None if is_client else "127.0.0.1:1")
