"""How the templates of one loader start: as forks of the root, as interpreters, or as a fork of the trainer.

A fork of the root is quick, because the root has imported what the dataset needs. If there is no root for this loader,
it starts an interpreter. All get the same environment, recorded when the loader starts.
"""

from __future__ import annotations

from concurrent.futures import Future

from swift_loader.executors.process.blank_template import BlankTemplate, discard
from swift_loader.executors.process.child import Start
from swift_loader.executors.process.event_loop_thread import EventLoopThread
from swift_loader.executors.process.launch import Launch
from swift_loader.executors.process.roots import ROOTS
from swift_loader.worker.spec import StartMethod

_MAX_ROOTS = 2
"""How many are tried. The second one starts if the source of a module has changed since the first one imported it."""

_IMPORT_LIMIT_S = 60.0
"""How long a root may take for its imports. Then the loader starts its own interpreter, which may take any time."""


class TemplateStarts:
    """Starts interpreters and asks for forks of the root, in one recorded environment."""

    def __init__(self, launch: Launch, modules: tuple[str, ...], start_method: StartMethod) -> None:
        """`launch` is closed with this object. `modules`: what a template will import, as far as it is known yet.

        `start_method`: `SPAWN` never uses the root.
        """
        self._launch = launch
        self._modules = modules
        self._uses_root = start_method is StartMethod.TEMPLATE
        self._ahead: tuple[Future[BlankTemplate], frozenset[str]] | None = None
        """A fork that was asked for while the payload was written, and the modules that it has."""

    def ask_ahead(self) -> None:
        """Ask the root for the first template, if it is likely to have what is needed."""
        if self._uses_root:
            self._ahead = ROOTS.fork_ahead(self._launch, self._modules)

    def need(self, modules: tuple[str, ...]) -> None:
        """Note what templates will import besides. Called before `next`, if at all."""
        self._modules = tuple(dict.fromkeys((*self._modules, *modules)))

    def descriptors(self) -> list[int]:
        """Return the descriptor that it owns."""
        return [self._launch.directory]

    def is_current(self) -> bool:
        """Return whether this process still has the recorded environment."""
        return self._launch.is_current()

    def close(self) -> None:
        """Close the descriptor, and let a fork exit that wasn't used."""
        self._take_ahead(None)
        self._launch.close()

    def next(self, thread: EventLoopThread, *, is_first: bool) -> tuple[Start, BlankTemplate | None]:
        """Return what starts the next template, and the fork of the root that it is, if it is one. Supervisor's thread.

        `thread` goes on with its work meanwhile. `is_first`: it is the loader's first one. Later ones use the root only
        if that has their environment. Raises `Stopped` if the thread is being stopped.
        """
        blank = self._fork_root(thread, is_first=is_first) if self._uses_root else None
        return (self._launch.start, None) if blank is None else (blank.start, blank)

    def _fork_root(self, thread: EventLoopThread, *, is_first: bool) -> BlankTemplate | None:
        """Return a fork of the root. None if there is no root for this loader."""
        for _ in range(_MAX_ROOTS):
            request = self._take_ahead(frozenset(self._modules))
            request = request or ROOTS.fork(self._launch, self._modules, may_start=is_first)
            if request is None:
                return None
            request.add_done_callback(lambda _: thread.loop.wake())
            try:
                is_answered = thread.run_until(request.done, _IMPORT_LIMIT_S)
            except BaseException:
                request.add_done_callback(discard)
                raise
            if not is_answered:
                request.add_done_callback(discard)
                ROOTS.give_up(self._modules)
            elif request.exception() is None:
                return request.result()
        return None

    def _take_ahead(self, needed: frozenset[str] | None) -> Future[BlankTemplate] | None:
        """Return the fork that was asked for ahead, if it has these modules. Else, or for None, let it exit."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        request, modules = ahead
        if needed is not None and needed <= modules:
            return request
        request.add_done_callback(discard)
        return None
