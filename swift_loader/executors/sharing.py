"""Makes what ranks that need the same data use. It exists on Linux only, so it is imported once it is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swift_loader.executors import processes
from swift_loader.metrics.metrics import Metrics
from swift_loader.options import DeliveryOptions
from swift_loader.worker.spec import StartMethod, WorkerSpec

if TYPE_CHECKING:
    from swift_loader.executors.group.follower import GroupFollower
    from swift_loader.executors.group.leader import GroupLeader
    from swift_loader.executors.group.meeting import ConnectedGroup, Listener
    from swift_loader.transport.by_value import Definitions

__all__ = ["listen", "make_follower", "make_leader"]


def listen(start_method: StartMethod) -> Listener | None:
    """Return where this rank can be found by those that need the same data; None if it can't share memory."""
    if start_method.on(processes.PLATFORM) is StartMethod.PORTABLE:
        return None
    from swift_loader.executors.group.meeting import Listener

    return Listener.open()


def make_leader(meeting: ConnectedGroup, spec: WorkerSpec, options: DeliveryOptions) -> GroupLeader:
    """Return what hands batches on to other ranks. It owns the meeting. `spec`: what the workers start with."""
    from swift_loader.executors.group.leader import GroupLeader

    return GroupLeader(meeting.group, meeting.channels, spec.plan, options.limits.max_in_flight)


def make_follower(
    meeting: ConnectedGroup,
    spec: WorkerSpec,
    options: DeliveryOptions,
    metrics: Metrics,
) -> GroupFollower:
    """Return the executor that gets its batches from another rank. It owns the meeting."""
    from swift_loader.executors.group.follower import GroupFollower

    [channel] = meeting.channels.values()
    return GroupFollower(meeting.group, channel, spec, options, metrics, _definitions(spec))


def _definitions(spec: WorkerSpec) -> Definitions:
    if spec.options.start_method is StartMethod.FORK:
        from swift_loader.executors.process.trainer_fork import TrainerFork

        return TrainerFork(spec).definitions
    from swift_loader.transport.payload import definitions_of

    return definitions_of(spec)
