"""The payload's content as the template uses it, in a fork: reading it changes settings of the process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from swift_loader.transport.channel import Channel
from swift_loader.transport.frames import unpack_frame
from swift_loader.transport.messages import Failure, FailureStage, Ready
from swift_loader.transport.payload import Environment, read_environment, read_payload, write_payload
from swift_loader.transport.reports import BuildReport, Verdict
from swift_loader.transport.segments import Segment
from swift_loader.worker.dataset_builder import DatasetBuilder
from swift_loader.worker.import_guard import refuse_nesting
from swift_loader.worker.spec import WorkerSpec
from tests.support.forked import run_in_fork
from tests.support.specs import spec_of


class Squares:
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        return index**2


class Unstable(Squares):
    def __getitem__(self, index: int) -> int:
        return int.from_bytes(os.urandom(8), "little")


class Broken:
    def __init__(self) -> None:
        raise KeyError("no such file")


def check(source: dict[str, Any], examine: Callable[[DatasetBuilder], object], **environment: Any) -> None:
    """Let a fork examine the content that another process would have received."""
    spec: WorkerSpec = spec_of(**source)
    layout, descriptor, _ = write_payload(spec, Environment(["train.py"], **environment))
    segment = Segment.attach(descriptor, layout.total_nbytes, private=True)
    dataset_builder = DatasetBuilder(partial(read_payload, layout, segment), read_environment(layout, segment))
    assert run_in_fork(lambda: examine(dataset_builder)) == 0


def test_the_settings_of_the_trainer_are_copied() -> None:
    def examine(dataset_builder: DatasetBuilder) -> None:
        dataset_builder.read()
        assert sys.getrecursionlimit() == 54321
        assert torch.get_default_dtype() is torch.float64
        assert torch.get_num_threads() == 1
        assert "json.tool" in sys.modules
        assert dataset_builder.spec.options.dataset_class is Squares
        refuse_nesting()

    modules = ("json.tool", "no_such_module")
    sys.modules.pop("json.tool", None)
    check({"dataset_class": Squares}, examine, recursion_limit=54321, torch_dtype="float64", modules=modules)


def test_a_recursion_limit_is_not_lowered() -> None:
    before = sys.getrecursionlimit()

    def examine(dataset_builder: DatasetBuilder) -> None:
        dataset_builder.read()
        assert sys.getrecursionlimit() == before

    check({"dataset_class": Squares}, examine, recursion_limit=10)


def test_the_reports_have_the_length_and_the_same_checksums() -> None:
    def examine(dataset_builder: DatasetBuilder) -> None:
        dataset_builder.read()
        dataset_builder.build()
        assert dataset_builder.report_length() == BuildReport(9, hash("swift_loader"))
        report = dataset_builder.report()
        assert report.num_samples == 9
        assert report.checksums
        dataset_builder.is_shared = True
        shared = dataset_builder.report()
        both = min(len(report.checksums), len(shared.checksums))
        assert both
        assert shared.checksums[:both] == report.checksums[:both]

    check({"dataset_class": Squares}, examine)


def test_the_dataset_can_be_dropped_and_built_anew() -> None:
    def examine(dataset_builder: DatasetBuilder) -> None:
        dataset_builder.read()
        dataset_builder.build()
        dataset_builder.drop()
        dataset_builder.read()
        dataset_builder.build()
        assert dataset_builder.report_length().num_samples == 9

    check({"dataset": Squares()}, examine)


def test_samples_that_change_with_each_fetch_are_judged_unstable() -> None:
    def examine(dataset_builder: DatasetBuilder) -> None:
        dataset_builder.read()
        dataset_builder.build()
        verdicts = dataset_builder.judge(dataset_builder.report()).by_index
        assert set(verdicts.values()) == {Verdict.UNSTABLE}

    check({"dataset_class": Unstable}, examine)


def test_a_worker_without_a_dataset_builds_one_and_reports_what_that_raises() -> None:
    def examine(dataset_builder: DatasetBuilder) -> None:
        ours, theirs = Channel.pair()
        dataset_builder.read()
        dataset_builder.run_worker(0, theirs)
        received = ours.receive()
        assert received is not None
        failure = Failure.unpack(unpack_frame(received.data))
        assert (failure.stage, failure.type_name, failure.message) == (FailureStage.BUILD, "KeyError", "'no such file'")

    check({"dataset_class": Broken}, examine)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_worker_reports_checksums_unless_it_shares_the_templates_dataset(is_shared: bool) -> None:
    def examine(dataset_builder: DatasetBuilder) -> None:
        ours, theirs = Channel.pair()
        dataset_builder.read()
        if is_shared:
            dataset_builder.build()
            dataset_builder.is_shared = True
        if not os.fork():
            ours.close()
            dataset_builder.run_worker(0, theirs)
            os._exit(0)
        theirs.close()
        received = ours.receive()
        assert received is not None
        report = Ready.unpack(unpack_frame(received.data)).report
        assert report.num_samples == 9
        assert (report.checksums == ()) is is_shared
        assert len(received.descriptors) == 1
        ours.close()
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0

    check({"dataset_class": Squares}, examine)
