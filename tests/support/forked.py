"""Runs a function in a fork of the test's process, for code that changes or ends its process."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

LIMIT_S = 60


def run_in_fork(work: Callable[[], object]) -> int:
    """Return the fork's exit code: 0 if `work` returns, 1 if it raises, and negative if a signal ends it."""
    pid = os.fork()
    if not pid:
        try:
            signal.alarm(LIMIT_S)
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)
