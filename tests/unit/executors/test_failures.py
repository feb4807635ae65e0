from __future__ import annotations

import numpy as np
import pytest

from swift_loader.errors import RemoteTraceback, WorkerError
from swift_loader.executors.failures import describe_batch, rebuild, rebuild_sample
from swift_loader.transport.arena import Arena
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.codec import encode
from swift_loader.transport.messages import Failure, FailureStage, SampleFailed


def failure_of(content: object, index: int | None = 7) -> Failure:
    """Return the failure of a worker that sends this as its exception; bytes are sent as they are."""
    if isinstance(content, bytes):
        pickled, num_blocks = content, 0
    else:
        sent = encode(content, Arena(np.empty(0, np.uint8)), Definitions().number_of)
        pickled, num_blocks = bytes(sent.meta), sent.num_blocks
    return Failure(1, 2, FailureStage.FETCH, index, pickled, num_blocks, "KeyError", "'a'", "the remote traceback")


def test_an_exception_keeps_its_type_and_its_cause_says_where_it_was_raised() -> None:
    error = rebuild(failure_of(KeyError("a")), "worker 1", Definitions(), ", batch 5")
    assert (type(error), error.args) == (KeyError, ("a",))
    assert isinstance(error.__cause__, RemoteTraceback)
    context = "In worker 1, fetching a sample, dataset index 7, batch 5:"
    assert f"{context}\n\nthe remote traceback" in str(error.__cause__)


@pytest.mark.parametrize("content", [b"no pickle", "no exception", KeyboardInterrupt()])
def test_what_is_no_exception_here_becomes_a_worker_error_with_its_text(content: object) -> None:
    error = rebuild(failure_of(content, index=None), "worker 1", Definitions())
    assert type(error) is WorkerError
    assert str(error) == "In worker 1, fetching a sample: KeyError: 'a'"
    assert isinstance(error.__cause__, RemoteTraceback)


def test_a_failed_sample_is_recorded_with_its_batch_and_what_replaces_it() -> None:
    error = KeyError("a")
    failed = SampleFailed(failure=failure_of(error), position=3, replaced_by=9)
    sample = rebuild_sample(failed, 4, 5, error)
    assert (sample.epoch, sample.step, sample.index, sample.replaced_by) == (4, 5, 7, 9)
    assert sample.exception is error
    assert (sample.reason, sample.traceback) == ("KeyError: 'a'", "the remote traceback")


@pytest.mark.parametrize(
    ("num_indices", "shown"),
    [
        (1, "0"),
        (3, "0, 1, 2"),
        (8, "0, 1, 2, 3, 4, 5, 6, 7"),
        (9, "0, 1, 2, 3, 4, 5, 6, 7, ... 9 in all"),
    ],
)
def test_a_batch_is_described_by_epoch_number_and_up_to_eight_indices(num_indices: int, shown: str) -> None:
    assert describe_batch(2, 5, range(num_indices)) == f"batch 5 of epoch 2 (dataset indices {shown})"
