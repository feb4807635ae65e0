"""Does tasks that call a function of the user's: in threads or on an event loop of this process.

A crew is the workers of a stage. Each worker does one task at a time, in the order sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from swift_loader.scheduler.messages import Event

Post = Callable[[Iterable[Event]], None]
"""Takes the events of a task. Any thread calls it. It never blocks."""
