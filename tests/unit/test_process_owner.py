from __future__ import annotations

import os

import pytest

from swift_loader import SwiftLoaderError
from swift_loader.process_owner import ProcessOwner


def test_the_process_that_made_it_is_the_owner_and_a_fork_is_not() -> None:
    owner = ProcessOwner()
    assert owner.is_here()
    owner.check()
    child = os.fork()
    if child == 0:
        os._exit(owner.is_here())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_another_process_is_refused_with_both_pids() -> None:
    with pytest.raises(SwiftLoaderError, match=rf"started in process {os.getppid()}, .* \(pid {os.getpid()}\)"):
        ProcessOwner(os.getppid()).check()
