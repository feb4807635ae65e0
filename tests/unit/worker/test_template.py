"""A template on a channel: what it answers to the trainer's requests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from swift_loader.transport.channel import Channel, Received
from swift_loader.transport.frames import Kind, pack_frame, unpack_frame
from swift_loader.transport.messages import Failure, FailureStage, Ready, Recheck
from swift_loader.transport.payload import Environment, write_payload
from swift_loader.transport.template_messages import Built, Exited, Fork, Forked
from swift_loader.worker.spec import WorkerSpec
from tests.support import datasets
from tests.support.helpers import ROOT
from tests.support.specs import spec_of

PROGRAM = "from swift_loader.worker.template import main; main()"
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Threads of NumPy's BLAS would make the process unfit for forks."""


class Template:
    """A template, seen from the trainer."""

    def __init__(self, source: dict[str, Any], **options: Any) -> None:
        self.channel, theirs = Channel.pair()
        self.traces, other = socket.socketpair()
        numbers = [theirs.fileno(), os.getpid(), other.fileno()]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *map(str, numbers)],
            pass_fds=(numbers[0], numbers[2]),
            cwd=ROOT,
            env=os.environ | ONE_THREAD,
        )
        theirs.close()
        other.close()
        spec: WorkerSpec = spec_of(**source, **options)
        layout, descriptor, _ = write_payload(spec, Environment(["train.py"]))
        self.send(layout.pack(), descriptor)

    def send(self, message: bytes, *descriptors: int) -> None:
        """Send a message with descriptors that aren't needed here any more."""
        self.channel.send(message, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def receive(self, kind: Any) -> tuple[Any, list[int]]:
        return _received(self.channel.receive(), kind)

    def start_worker(self, worker: int) -> tuple[Channel, int]:
        """Ask for a worker; return its channel and pid."""
        ours, theirs = Channel.pair()
        stderr, traces = os.dup(2), os.dup(self.traces.fileno())
        self.send(Fork(worker, in_place=False).pack(), os.dup(theirs.fileno()), stderr, traces)
        theirs.close()
        forked, [pidfd] = self.receive(Forked)
        os.close(pidfd)
        assert forked.worker == worker
        return ours, forked.pid

    def close(self) -> int:
        """Hang up; return the template's exit code."""
        self.channel.close()
        exit_code = self.process.wait(60)
        self.traces.close()
        return exit_code


def _received(received: Received | None, kind: Any) -> tuple[Any, list[int]]:
    assert received is not None
    frame = unpack_frame(received.data)
    assert frame.kind is kind.KIND
    return kind.unpack(frame), received.descriptors


def ready_of(channel: Channel) -> Ready:
    ready, [descriptor] = _received(channel.receive(), Ready)
    os.close(descriptor)
    assert isinstance(ready, Ready)
    return ready


@pytest.fixture(name="templates")
def _templates() -> Iterator[list[Template]]:
    templates: list[Template] = []
    yield templates
    assert [template.close() for template in templates] == [0] * len(templates)


def test_workers_share_the_dataset_that_the_template_has_built(templates: list[Template]) -> None:
    templates.append(template := Template({"dataset_class": datasets.Counting}))
    built, _ = template.receive(Built)
    assert (built.report.num_samples, built.forkable, built.reason) == (100, True, "")
    assert built.report.checksums
    channels = []
    for worker in range(2):
        channel, _ = template.start_worker(worker)
        channels.append(channel)
        assert ready_of(channel).report.checksums == ()
    template.send(Recheck().pack())
    received = template.channel.receive()
    assert received is not None
    assert unpack_frame(received.data).kind is Kind.RECHECKED
    for channel in channels:
        channel.close()
    assert sorted(template.receive(Exited)[0].worker for _ in range(2)) == [0, 1]


@pytest.mark.parametrize(
    ("factory", "options"), [(datasets.OpensAFile, {}), (datasets.Counting, {"dataset_per_worker": True})]
)
def test_a_dataset_that_cannot_be_shared_is_built_in_each_worker(
    factory: type, options: dict[str, Any], templates: list[Template]
) -> None:
    templates.append(template := Template({"dataset_class": factory}, **options))
    built, _ = template.receive(Built)
    assert built.forkable
    assert ("opened descriptors" in built.reason) is (factory is datasets.OpensAFile)
    channel, _ = template.start_worker(0)
    assert ready_of(channel).report.checksums
    channel.close()
    assert template.receive(Exited)[0] == Exited(0, 0)


def test_the_exit_code_of_a_worker_is_reported(templates: list[Template]) -> None:
    templates.append(template := Template({"dataset_class": datasets.Counting}))
    template.receive(Built)
    channel, pid = template.start_worker(3)
    ready_of(channel)
    os.kill(pid, signal.SIGKILL)
    assert template.receive(Exited)[0] == Exited(3, -signal.SIGKILL)
    channel.close()


def test_what_building_raises_is_reported_and_the_template_ends(templates: list[Template]) -> None:
    templates.append(template := Template({"dataset_class": datasets.FailsToBuild}))
    failure, _ = template.receive(Failure)
    assert (failure.stage, failure.type_name) == (FailureStage.BUILD, "tests.support.datasets.CustomError")
    assert template.channel.receive() is None


def test_a_template_that_cannot_be_forked_becomes_the_worker(templates: list[Template]) -> None:
    templates.append(template := Template({"dataset_class": datasets.Counting}, start_method="spawn"))
    built, _ = template.receive(Built)
    assert (built.forkable, built.reason) == (False, "start_method='spawn'")
    ours, theirs = Channel.pair()
    template.send(Fork(0, in_place=True).pack(), os.dup(theirs.fileno()))
    theirs.close()
    assert template.channel.receive() is None
    assert ready_of(ours).report.num_samples == 100
    ours.close()


def test_a_template_whose_trainer_hangs_up_at_once_ends(templates: list[Template]) -> None:
    templates.append(Template({"dataset_class": datasets.Counting}))


def test_another_request_ends_the_template_with_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    template = Template({"dataset_class": datasets.Counting})
    template.receive(Built)
    template.send(pack_frame(Kind.BATCH))
    assert template.channel.receive() is None
    assert template.close() == 1
    assert "a template was sent BATCH instead of FORK" in capfd.readouterr().err
