from __future__ import annotations

from typing import Any

import pytest

from swift_loader.executors.failures import rebuild
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.channel import MAX_MESSAGE_BYTES
from swift_loader.transport.frames import unpack_frame
from swift_loader.transport.messages import Failure, FailureStage, SampleFailed
from swift_loader.worker.failure import describe_failure
from tests.support.helpers import make_loader


def raised(message: str, note: str = "") -> Failure:
    try:
        raise ValueError(message)
    except ValueError as error:
        return describe_failure(error, FailureStage.FETCH, Definitions(), index=3, note=note)


@pytest.mark.parametrize("letter", ["a", "é", "漢", "😀", "\udcff", "\0"])
@pytest.mark.parametrize("count", [10, 5_000, 12_000, 200_000])
def test_a_failure_fits_into_a_message_whatever_its_letters(letter: str, count: int) -> None:
    failure = raised(letter * count, note=letter * count)
    for message in (failure.pack(), SampleFailed(0, None, failure).pack()):
        assert len(message) <= MAX_MESSAGE_BYTES
    arrived = Failure.unpack(unpack_frame(memoryview(failure.pack())))
    assert arrived == failure
    assert arrived.message.startswith(letter if letter.isprintable() or letter == "\0" else "\\udcff")
    assert len(arrived.message.encode()) >= min(12 * 1024 - 3, count)


def test_the_name_of_a_type_may_be_long() -> None:
    error = type("漢" * 50_000, (Exception,), {})("x")
    assert len(describe_failure(error, FailureStage.FETCH, Definitions()).pack()) <= MAX_MESSAGE_BYTES


@pytest.mark.parametrize("letter", ["a", "漢"])
@pytest.mark.parametrize("count", [20_000, 200_000])
def test_an_exception_keeps_its_type_however_long_its_text_is(letter: str, count: int) -> None:
    error = KeyError(letter * count)
    error.note = letter * count  # type: ignore[attr-defined]
    failure = describe_failure(error, FailureStage.FETCH, Definitions())
    arrived = rebuild(failure, "a worker", Definitions())
    assert type(arrived) is KeyError
    assert arrived.args[0].startswith(letter * 4096)
    assert len(failure.pack()) <= MAX_MESSAGE_BYTES


class Verbose:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise ValueError(f"{index}: " + "漢" * 12_000)
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_a_long_message_that_is_not_ascii_arrives(workers: int) -> None:
    with make_loader(Verbose, workers=workers, batch_size=4, shuffle=False) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(ValueError, match="5: 漢漢漢"):
            next(batches)


@pytest.mark.filterwarnings("ignore:epoch 0:swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_long_message_that_is_not_ascii_can_be_skipped(workers: int) -> None:
    with make_loader(Verbose, workers=workers, batch_size=4, shuffle=False, on_error="skip") as loader:
        assert sum(len(batch) for batch in loader) == 19
