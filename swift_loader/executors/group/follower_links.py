"""The connections of the rank that loads to all ranks that share its batches, and the wait for what they send."""

from __future__ import annotations

import os
import select
from collections.abc import Mapping
from contextlib import ExitStack

from swift_loader.executors.group.follower_link import FollowerLink
from swift_loader.transport.channel import Channel
from swift_loader.transport.descriptors import new_epoll, new_eventfd

__all__ = ["FollowerLinks"]


class FollowerLinks:
    """The ranks that share the batches and aren't gone. The caller holds the leader's lock, if nothing else is said."""

    def __init__(self, channels: Mapping[int, Channel]) -> None:
        """Listen to these ranks. This object owns the channels."""
        with ExitStack() as undo:
            for channel in channels.values():
                undo.callback(channel.close)
            self._epoll = new_epoll()
            undo.callback(self._epoll.close)
            self._wake = new_eventfd()
            undo.callback(os.close, self._wake)
            self._epoll.register(self._wake, select.EPOLLIN)
            self._by_process = {process: FollowerLink(process, channels[process], self._epoll) for process in channels}
            undo.pop_all()

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns; -1 once closed. Needs no lock."""
        channels = [link.fileno() for link in self.values()]
        return [self._wake, -1 if self._epoll.closed else self._epoll.fileno(), *channels]

    def values(self) -> list[FollowerLink]:
        """Return the links. The list is a copy: a link may be forgotten meanwhile."""
        return list(self._by_process.values())

    def wait(self) -> list[tuple[int, int]]:
        """Block until a rank sends, a socket has room for a backlog, or `wake`. The caller holds no lock.

        Returns:
            What `serve` takes.
        """
        return self._epoll.poll()

    def serve(self, ready: list[tuple[int, int]]) -> list[FollowerLink]:
        """Send the backlogs for which there is room. Return the ranks that have sent something, or are gone."""
        by_descriptor = {link.fileno(): link for link in self.values()}
        readable = []
        for descriptor, events in ready:
            link = by_descriptor.get(descriptor)
            if link is None:
                continue
            if events & select.EPOLLOUT:
                link.flush()
            if events & ~select.EPOLLOUT:
                readable.append(link)
        return readable

    def flush_until(self, deadline_s: float) -> None:
        """Send the backlogs. Blocks until that is done, but no longer than until `time.monotonic()` is so late."""
        for link in self.values():
            link.flush_until(deadline_s)

    def forget(self, link: FollowerLink) -> None:
        """Close a link, and go on without it."""
        self._by_process.pop(link.process, None)
        link.close()

    def wake(self) -> None:
        """End the current `wait` and all later ones. Needs no lock."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close all descriptors. Nobody may be in `wait`."""
        for link in self.values():
            self.forget(link)
        self._epoll.close()
        wake, self._wake = self._wake, -1  # first, see `Holder`
        os.close(wake)

    def __len__(self) -> int:
        return len(self._by_process)

    def __repr__(self) -> str:
        return f"<FollowerLinks {self.values()}>"
