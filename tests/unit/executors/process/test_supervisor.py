"""How the supervisor lets go of a worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from swift_loader.executors.process.supervisor import Supervisor
from swift_loader.scheduler.events import Ended
from tests.support.specs import spec_of


class FakeInboxes:
    """Records what happens to the workers."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.posted = SimpleNamespace(post=self.log.append)

    def forget(self, worker: Any) -> None:
        self.log.append(worker.serial)


def test_no_inbox_listens_to_a_worker_whose_end_is_reported() -> None:
    setup: Any = SimpleNamespace(limits=None)
    supervisor = Supervisor(spec_of(), setup)
    inboxes: Any = FakeInboxes()
    supervisor._inboxes = inboxes
    diagnostics = SimpleNamespace(fileno=lambda: -1, last_traces=str, last_lines=str)
    process = SimpleNamespace(
        pid=8, exit_code=0, diagnostics=diagnostics, template=SimpleNamespace(pid=7, is_gone=False)
    )
    worker: Any = SimpleNamespace(serial=3, worker_id=1, process=process, is_at_work=False)
    try:
        supervisor._reap(worker)
    finally:
        supervisor._thread.loop.close()
    number, ended = inboxes.log
    assert number == 3
    assert isinstance(ended, Ended)
