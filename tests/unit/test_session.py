"""A session that can't be made."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from swift_loader import SwiftLoader, session
from swift_loader.executors.group.meeting import ConnectedGroup
from swift_loader.executors.group.messages import End, Ended
from swift_loader.ranks.group import Group, Member, Offer
from swift_loader.session import Session
from tests.support.group_ends import new_pair, next_frame
from tests.support.specs import spec_of

_MEMBERS = tuple(Member(process, Offer("node", 100 + process, "address")) for process in range(2))


def fail(*_: object, **__: object) -> Any:
    raise OSError("no executor")


@pytest.mark.parametrize("process", [0, 1])
def test_a_session_of_a_group_that_cannot_be_made_leaves_nothing_behind(
    process: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "make_executor" if process == 0 else "Dispatcher", fail)
    ours, theirs = new_pair()
    meeting = ConnectedGroup(Group(_MEMBERS, process), {1 - process: ours})
    options = SwiftLoader(dataset=[], worker_per_consumer=1)._options
    starter: Any = SimpleNamespace(spec=spec_of()) if process == 0 else None
    threads = threading.active_count()
    with pytest.raises(OSError, match="no executor"):
        Session(options, spec_of().plan, None, supervisor=starter, meeting=meeting)
    assert ours.fileno() < 0
    assert threading.active_count() == threads
    frame = next_frame(theirs)
    if process == 0:
        assert frame is not None
        assert Ended.unpack(frame) == Ended(End.FAILED, "OSError: no executor")
    else:
        assert frame is None
    theirs.close()
