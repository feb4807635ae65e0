"""A rank that loads, or one that shares its batches, in this process, and the other end of its channel."""

from __future__ import annotations

import os
import resource
import select
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from swift_loader import SwiftLoader
from swift_loader.executors.group.follower import GroupFollower
from swift_loader.executors.group.leader import GroupLeader
from swift_loader.metrics.metrics import Metrics
from swift_loader.ranks.group import Group, Member, Offer
from swift_loader.transport.channel import Channel
from swift_loader.transport.frames import Frame, unpack_frame
from swift_loader.transport.payload import definitions_of
from tests.support.helpers import allowed_s
from tests.support.specs import spec_of

__all__ = ["descriptors_left", "new_follower", "new_leader", "new_pair", "next_frame"]

_MEMBERS = tuple(Member(process, Offer("node", 100 + process, "address")) for process in range(2))


def new_pair() -> tuple[Channel, Channel]:
    """Return the two ends of a channel of a group."""
    ends = Channel.pair()
    for end in ends:
        os.set_blocking(end.fileno(), False)
    return ends


def new_leader(channel: Channel, max_ahead: int = 4) -> GroupLeader:
    """Return rank 0, which loads for rank 1 and owns the channel to it."""
    return GroupLeader(Group(_MEMBERS, 0), {1: channel}, spec_of().plan, max_ahead)


def new_follower(channel: Channel, **options: Any) -> GroupFollower:
    """Return rank 1, which owns the channel to rank 0. It isn't started."""
    spec = spec_of()
    delivery = SwiftLoader(**{"dataset": [], "worker_per_consumer": 1, **options})._options.delivery
    group = Group(_MEMBERS, 1)
    return GroupFollower(group, channel, spec, delivery, Metrics(enabled=False), definitions_of(spec))


def next_frame(channel: Channel) -> Frame | None:
    """Wait for the next message of the other end, and return it; None at its end."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    assert poll.poll(allowed_s(10) * 1000), "nothing has come"
    received = channel.receive(wait=False)
    return None if received is None else unpack_frame(received.data)


@contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    """Let this process open only so many more descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    names = os.listdir("/proc/self/fd")
    taken = [os.dup(0) for _ in range(max(map(int, names)) - len(names) + 4)]  # no gaps among the numbers
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1 + number, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)
