"""The trial batch, for which a loader waits when it starts. It runs on the thread that starts the loader."""

from __future__ import annotations

import time

from swift_loader.delivery.driver import Driver
from swift_loader.executors.base import Inbox
from swift_loader.scheduler.work import PlannedWork


def try_out(driver: Driver, inbox: Inbox, work: PlannedWork, grace_s: float, *, keeps_trial: bool) -> None:
    """Build a batch, and wait until it is there. The caller leads, and has started the executor.

    `grace_s`: seconds that replacing a worker may take. `keeps_trial`: the loop may get the batch as its first one.
    Raises `LoaderClosed` if another thread closed the loader, else what building the batch raised, or why none can be
    built.
    """
    with driver.lock:
        driver.scheduler.try_out(work)
        driver.scheduler.watchdog.begin(time.monotonic(), grace_s)
    while True:
        with driver.lock:
            driver.check_open()
            trial = driver.scheduler.take_trial()
            if trial is None and driver.error is not None:
                raise driver.error
        if trial is not None:
            break
        driver.act()
        if driver.error is None:
            driver.receive_or_judge(inbox)
    if trial.error is not None:
        raise trial.error
    if not keeps_trial:
        with driver.lock:
            dropped = driver.scheduler.forget_trial()
        del dropped  # outside the lock
