from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from swift_loader import RayExecutor, SwiftLoader, SwiftLoaderWarning
from swift_loader.executors.ray.connection import Connection, describe_room
from tests.support.datasets import Counting


class FakeRay(SimpleNamespace):
    """The part of Ray that connects."""

    def __init__(self, *, is_connected: bool = False) -> None:
        super().__init__(util=SimpleNamespace())
        self.is_connected, self.log = is_connected, list[Any]()

    def is_initialized(self) -> bool:
        return self.is_connected

    def init(self, address: str, **_: Any) -> None:
        self.log.append(address)
        self.is_connected = True

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_job_id=lambda: len(self.log), gcs_address="head:6379")

    def shutdown(self) -> None:
        self.log.append("shutdown")
        self.is_connected = False


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return fake


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    refused = pytest.raises(ImportError, match=r"pip install 'swift_loader\[ray\]'")
    with SwiftLoader(Counting, executor=RayExecutor(1)) as loader, refused:
        loader.start()


def test_nothing_of_ray_is_imported_before_a_loader_starts() -> None:
    code = (
        "import sys, swift_loader.executors.ray.mixed, swift_loader.worker.actor; from swift_loader import *; "
        "SwiftLoader(list, executor=RayExecutor(1)); DataLoader([1], executor=RayExecutor(1)); "
        "assert 'ray' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_users_connection_is_left_alone(ray: FakeRay) -> None:
    ray.is_connected = True
    connection = Connection(None)
    connection.open()
    connection.close()
    assert ray.log == []


def test_an_address_without_effect_is_told(ray: FakeRay) -> None:
    ray.is_connected = True
    Connection("head:6379").open()
    with pytest.warns(SwiftLoaderWarning, match=r"connected to the cluster at 'head:6379'"):
        Connection("head:6380").open()


def test_the_last_loader_ends_the_connection_that_the_first_one_made(ray: FakeRay) -> None:
    first, second = Connection("auto"), Connection(None)
    first.open()
    second.open()
    first.close()
    first.close()
    assert ray.log == ["auto"]
    second.close()
    assert ray.log == ["auto", "shutdown"]


def test_the_users_own_connection_after_ours_is_left_alone(ray: FakeRay) -> None:
    first = Connection(None)
    first.open()
    first.close()
    ray.init("mine")
    second = Connection(None)
    second.open()
    second.close()
    assert ray.log == ["auto", "shutdown", "mine"]


def test_the_address_is_the_option_or_the_environments(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray-of-environment")
    for given in ("ray-of-option", None):
        connection = Connection(given)
        connection.open()
        connection.close()
    assert ray.log[::2] == ["ray-of-option", "ray-of-environment"]


def test_a_cluster_that_does_not_answer_is_an_error_that_says_what_to_do(ray: FakeRay) -> None:
    with pytest.raises(ConnectionError, match=r"call ray\.init\(\) before the loader starts"):
        Connection("127.0.0.1:1").open()
    assert ray.log == []


def test_ray_client_is_refused(ray: FakeRay) -> None:
    ray.is_connected = True
    ray.util.client = SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: True))
    with pytest.raises(RuntimeError, match="Ray Client"):
        Connection(None).open()


def test_room_is_described_by_what_is_free_of_what_there_is() -> None:
    total = {"CPU": 8.0, "memory": 16e9, "object_store_memory": 5e9, "node:10.0.0.1": 1.0, "data": 2.0}
    assert describe_room(3, total, {"CPU": 0.5, "memory": 8e9}) == (
        "3 nodes with 0.5 of 8 CPU, 0 of 2 data, 8 of 16 GB of memory free"
    )
    assert describe_room(1, {"nope": 0}, {}) == "1 node with 0 of 0 nope free"
