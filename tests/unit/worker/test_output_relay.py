from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from swift_loader.worker.output_relay import OutputRelay


@pytest.fixture
def relay() -> Iterator[OutputRelay]:
    """A relay, to whose pipe a fork has written a line."""
    made = OutputRelay(1)
    pid = os.fork()
    if pid == 0:
        try:
            made.be_written_to()
            os.write(1, b"a line\n")
        finally:
            os._exit(0)
    made.close_writing()
    os.waitpid(pid, 0)
    yield made
    os.close(made.fileno())


@pytest.fixture
def pipes() -> Iterator[list[tuple[int, int]]]:
    made = [os.pipe(), os.pipe()]
    yield made
    for descriptor in {number for pipe in made for number in pipe}:
        try:
            os.close(descriptor)
        except OSError:  # the test has closed it
            continue


def test_output_goes_to_the_first_rank_only(relay: OutputRelay, pipes: list[tuple[int, int]]) -> None:
    (first, to_first), (second, to_second) = pipes
    assert relay.forward([to_first, to_second])
    os.set_blocking(second, False)
    assert os.read(first, 100) == b"a line\n"
    with pytest.raises(BlockingIOError):
        os.read(second, 100)
    assert not relay.forward([to_first, to_second])


def test_output_goes_to_the_next_rank_if_nobody_reads_the_first_ones(
    relay: OutputRelay, pipes: list[tuple[int, int]]
) -> None:
    (first, to_first), (second, to_second) = pipes
    os.close(first)
    assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN
    assert relay.forward([to_first, to_second])
    assert os.read(second, 100) == b"a line\n"


def test_output_that_no_rank_takes_is_dropped(relay: OutputRelay) -> None:
    assert relay.forward([])
    assert not relay.forward([])
