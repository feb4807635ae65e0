"""The trainer's handle on one worker that a template forked, or that was a template."""

from __future__ import annotations

from swift_loader.executors.handle import Handle
from swift_loader.executors.process.template import WorkerProcess
from swift_loader.transport.channel import Channel

WorkerHandle = Handle[Channel, WorkerProcess]
