"""A fork of the root, before and after it serves a loader."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import Future

import pytest

from swift_loader.executors.process.blank_template import BlankTemplate, discard
from swift_loader.transport.channel import Channel
from swift_loader.transport.frames import Kind, unpack_frame


def test_it_gets_copies_of_three_descriptors_then_the_end_of_the_stream() -> None:
    ours, theirs = Channel.pair()
    pipe = os.pipe()
    BlankTemplate(ours).start(pipe[0], pipe[1], pipe[1])
    received = theirs.receive()
    assert received is not None
    assert unpack_frame(received.data).kind is Kind.FORK
    copies = list(received.descriptors)
    assert theirs.receive() is None
    os.write(copies[2], b"x")
    assert os.read(copies[0], 1) == b"x"
    for descriptor in (*pipe, *copies):
        os.close(descriptor)
    theirs.close()


def test_one_that_is_gone_can_be_started() -> None:
    ours, theirs = Channel.pair()
    theirs.close()
    BlankTemplate(ours).start(0, 1, 2)


def test_its_exit_code_is_what_the_root_said() -> None:
    ours, theirs = Channel.pair()
    blank = BlankTemplate(ours)
    blank.close()
    theirs.close()
    assert blank.returncode is None
    with pytest.raises(subprocess.TimeoutExpired):
        blank.wait(0.01)
    blank.exited.set_result(-9)
    assert blank.wait(0.01) == -9
    assert blank.returncode == -9


def test_one_that_nobody_waits_for_any_more_is_let_go() -> None:
    ours, theirs = Channel.pair()
    answer: Future[BlankTemplate] = Future()
    answer.add_done_callback(discard)
    answer.set_result(BlankTemplate(ours))
    assert theirs.receive() is None
    theirs.close()
    refused: Future[BlankTemplate] = Future()
    refused.add_done_callback(discard)
    refused.set_exception(ValueError())
