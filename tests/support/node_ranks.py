"""Ranks of one node, each a process of its own, started as a launcher would: with environment variables only.

Run as a program, this is such a rank. It reads its options from stdin, then commands, one a line, and answers each with
a line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from swift_loader import SwiftLoader
from tests.support import node_datasets
from tests.support.figures import Measured
from tests.support.helpers import HANG_S, ROOT, SWITCH, wait_until

_MARK = "SWIFT_LOADER_TESTS_NODE"
"""All processes of a node have this variable, those included whose parent is gone."""

_MAX_TAKEN = 3

OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 7, "worker_per_consumer": 2}


class Rank:
    """The test's handle of a rank."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        """What its loader has logged so far."""
        return self._log.read_text()

    def ask(self, command: str) -> Any:
        """Have it carry out a command, and return the answer."""
        self.tell(command)
        return self.answer()

    def tell(self, command: str) -> None:
        """Have it carry out a command. `answer` returns the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Return the answer to the oldest command that wasn't answered."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the rank has ended with {self.process.wait(HANG_S)}"
        return json.loads(line)

    def rest_of_output(self) -> str:
        """Wait for the end of its stdout, and return what came before."""
        assert self.process.stdout is not None
        return self.process.stdout.read()

    def kill(self) -> None:
        """Kill it, and wait until it is gone."""
        self.process.kill()
        self.process.wait(HANG_S)

    def replace_a_worker(self) -> list[Any]:
        """Kill one of its workers, and wait for the other one that takes its place. Return the batches taken meanwhile.

        A loop that has taken several batches at once looks at its workers when it takes the next one. After a pause,
        threads look at them.
        """
        taken: list[Any] = []
        before = self.ask("workers")
        os.kill(before[0], signal.SIGKILL)

        def is_replaced() -> bool:
            if len(taken) < _MAX_TAKEN:
                taken.extend(self.ask("take 1"))
            now = self.ask("workers")
            return len(now) == len(before) and before[0] not in now

        wait_until(is_replaced, "another worker")
        assert before[1] in self.ask("workers")
        return taken


class Node:
    """The ranks of a node, and all their processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mark = uuid.uuid4().hex
        self.ranks: list[Rank] = []

    def start(
        self, num_ranks: int, dataset: str, *arguments: object, world_size: int | None = None, **options: Any
    ) -> list[Rank]:
        """Start ranks. They make their loaders, and start them with the command `start`.

        Args:
            num_ranks: How many.
            dataset: The name of a class in `tests.support.node_datasets`.
            arguments: Its number of samples, and a path.
            world_size: What the launcher says. Default: that there are as many.
            options: Of the loaders.
        """
        begin = len(self.ranks)
        for rank in range(num_ranks):
            environ = {
                **{name: value for name, value in os.environ.items() if not name.startswith("SWIFT_LOADER_TESTS")},
                **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size or num_ranks)),
                **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank % (world_size or num_ranks))),
                "MASTER_PORT": "29500",
                _MARK: self._mark,
                SWITCH: "0",
            }
            log = self._folder / f"log{begin}"
            given = json.dumps([dataset, arguments, {**OPTIONS, **options, "logger": str(log)}])
            with (self._folder / f"stderr{begin}.{rank}").open("w") as stderr:
                process = subprocess.Popen(
                    [sys.executable, "-m", __spec__.name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    cwd=ROOT,
                    env=environ,
                    text=True,
                )
            self.ranks.append(Rank(process, Path(f"{log}_rank{rank % (world_size or num_ranks)}.log")))
            self.ranks[-1].tell(given)
        return self.ranks[begin:]

    def processes(self) -> list[psutil.Process]:
        """Return all processes that live."""
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = f"{_MARK}={self._mark}\0" in Path(f"/proc/{process.pid}/environ").read_text()
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (OSError, psutil.NoSuchProcess):
                continue
        return found

    def wait_until_gone(self, timeout_s: float = HANG_S) -> None:
        """Return once no process is left."""
        wait_until(lambda: not self.processes(), f"no processes, {self.processes()}", timeout_s)

    def close(self) -> None:
        """Kill what is left."""
        for rank in self.ranks:
            rank.kill()
            for stream in (rank.process.stdin, rank.process.stdout):
                assert stream is not None
                stream.close()
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()


@contextmanager
def node(folder: Path) -> Iterator[Node]:
    """A node, all of whose processes end with this context."""
    made = Node(folder)
    try:
        yield made
    finally:
        made.close()


def start_all(ranks: Sequence[Rank]) -> list[Any]:
    """Start the ranks' loaders at the same time. Return their answers."""
    for rank in ranks:
        rank.tell("start")
    return [rank.answer() for rank in ranks]


def reference(num_samples: int, rank: int, num_ranks: int) -> list[list[int]]:
    """Return the ids of all batches of a rank, built without processes."""
    options = {**OPTIONS, "worker_per_consumer": 0, "nb_consumer": num_ranks}
    with SwiftLoader(node_datasets.Numbers, {"num_samples": num_samples}, **options) as loader:
        loader.start(rank)
        return [batch["id"].tolist() for batch in loader]


# In a rank ------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Carry out commands until stdin ends."""
    name, arguments, options = json.loads(sys.stdin.readline())
    dataset = getattr(node_datasets, name)
    kwargs = dict(zip(("num_samples", "path"), arguments, strict=False))
    rank = _Commands(SwiftLoader(dataset, kwargs, **options))
    for line in sys.stdin:
        command, *values = line.split()
        sys.stdout.write(f"{json.dumps(getattr(rank, command)(*map(int, values)))}\n")
        sys.stdout.flush()


class _Commands:
    """What a rank does when the test asks."""

    def __init__(self, loader: SwiftLoader) -> None:
        self._loader = loader
        self._batches: Iterator[Any] = iter(())

    def start(self) -> str:
        """Return the error, if there is one."""
        try:
            self._loader.start()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        self._batches = iter(self._loader)
        return ""

    def take(self, num_batches: int) -> list[list[int]]:
        return [next(self._batches)["id"].tolist() for _ in range(num_batches)]

    def rest(self) -> list[list[int]]:
        return [batch["id"].tolist() for batch in self._batches]

    def one(self) -> dict[str, list[int]]:
        return {name: values.tolist() for name, values in next(self._batches).items()}

    @property
    def _supervisor(self) -> Any:
        assert self._loader._session is not None
        executor: Any = self._loader._session.dispatcher._executor
        return executor._supervisor

    def workers(self) -> list[int]:
        handles = sorted(self._supervisor.workers.all.values(), key=lambda handle: handle.worker_id)
        return [handle.process.pid for handle in handles]

    def descriptors(self) -> int:
        return Measured.steady().descriptors

    def payload(self) -> int:
        """Return which file the payload is in."""
        return os.fstat(self._supervisor.templates._payload[1]).st_ino

    def template(self) -> int:
        return int(self._supervisor.templates.all[0].pid)

    def close(self) -> None:
        self._loader.close()


if __name__ == "__main__":
    main()
