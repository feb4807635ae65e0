"""What a program may see of the worker processes, under the names that torch's iterators have."""

from __future__ import annotations

from swift_loader.executors.handle import HandledProcess


class ProcessView:
    """One worker process, as a `multiprocessing.Process` shows it. The loader owns the process. Any thread."""

    daemon = True

    def __init__(self, worker_id: int, process: HandledProcess) -> None:
        self.name = f"DataLoader worker {worker_id}"
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    ident = pid

    @property
    def exitcode(self) -> int | None:
        """Its exit code, negative for a signal. None until it has ended. 0 if the loader ended it."""
        return self._process.exit_code

    def is_alive(self) -> bool:
        """Return whether it runs."""
        return not self._process.has_ended

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, or for `timeout` seconds."""
        self._process.wait_end(timeout)

    def terminate(self) -> None:
        """Send SIGTERM. The loader replaces the worker if it goes on."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL. The loader replaces the worker if it goes on."""
        self._process.kill()

    def __repr__(self) -> str:
        return f"<{self.name}, pid {self.pid}{'' if self.is_alive() else ', ended'}>"
