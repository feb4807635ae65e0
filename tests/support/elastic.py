"""Nodes of torchrun on this machine whose ranks are killed, and what they have written down."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.support.helpers import ROOT, program_environment, wait_until

_PATIENCE_S = 240
"""For the ranks to start again and train a few steps on a machine with other work."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of all ranks, as far as its files go."""

    name: str
    ranks: dict[int, list[dict[str, Any]]]
    """The lines of each rank: the first says who it is, each other one is a batch."""

    @property
    def world_size(self) -> int:
        return int(next(iter(self.ranks.values()))[0]["world_size"])

    @property
    def num_batches(self) -> int:
        """How many batches each rank has received, at least."""
        if len(self.ranks) < self.world_size:
            return 0
        return min(len(lines) for lines in self.ranks.values()) - 1

    @property
    def source(self) -> tuple[str | None, list[int]]:
        """The attempt that wrote the checkpoint from which this one resumed, and the epoch and position in it."""
        first = next(iter(self.ranks.values()))[0]
        return first["from"], first["at"]


def attempts_in(folder: Path) -> list[Attempt]:
    """Return all attempts, in the order of time."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for path in sorted(folder.glob("attempt-*.jsonl")):
        _, name, rank = path.stem.split("-")
        lines = path.read_text().splitlines(keepends=True)
        complete = [json.loads(line) for line in lines if line.endswith("\n")]
        if complete:
            found.setdefault(name, {})[int(rank)] = complete
    return [Attempt(name, ranks) for name, ranks in found.items()]


def surviving(attempts: list[Attempt]) -> list[tuple[int, int]]:
    """Return (epoch, dataset index) of all samples on the line of checkpoints that leads to the last attempt."""
    by_name = {attempt.name: attempt for attempt in attempts}
    attempt, end = attempts[-1], [sys.maxsize, 0]
    samples: list[tuple[int, int]] = []
    while True:
        for lines in attempt.ranks.values():
            for line in lines[1:]:
                if line["after"] <= end:
                    samples += [(line["after"][0], index) for index in line["ids"]]
        source, end = attempt.source
        if source is None:
            return samples
        attempt = by_name[source]


@dataclass(slots=True)
class Cluster:
    """Agents of torchrun, each like a node. The first one has the rendezvous, so it must live as long as the others.

    Use it as a context manager: on exit, it kills what still runs.
    """

    folder: Path
    script: str
    """In tests/system. Gets the folder as its first argument."""
    arguments: list[str]
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _port: int = 0

    def __enter__(self) -> Cluster:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        processes = []
        for agent in self.agents:
            if agent.poll() is None:
                process = psutil.Process(agent.pid)
                processes += [process, *process.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=10)
        for agent in self.agents:
            agent.wait(10)

    def add_node(self, num_ranks: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", f"--nproc-per-node={num_ranks}"]
        command += ["--max-restarts=100", "--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-id=elastic"]
        command += [f"--rdzv-endpoint=127.0.0.1:{self._port}", f"--log-dir={self.folder}"]
        command += [f"--rdzv-conf=is_host={int(not self.agents)},last_call_timeout=5,keep_alive_interval=2"]
        command += [str(ROOT / "tests" / "system" / self.script), str(self.folder), *self.arguments]
        environment = program_environment(self.folder) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self.folder / f"agent-{len(self.agents)}.log").open("wb") as log:
            agent = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        self.agents.append(agent)
        return agent

    def end_node(self, agent: subprocess.Popen[bytes]) -> None:
        """Take a node away, as a scheduler does that gives it to somebody else."""
        agent.send_signal(signal.SIGTERM)
        agent.wait(_PATIENCE_S)

    def trained(self, world_size: int, after: str, num_batches: int) -> Attempt:
        """Wait until all ranks of a later attempt of this size have so many batches. Return the attempt."""
        found: list[Attempt] = []

        def has_trained() -> bool:
            assert self.agents[0].poll() is None, self.logs()
            found[:] = [last for last in attempts_in(self.folder)[-1:] if last.name > after]
            return bool(found) and found[0].world_size == world_size and found[0].num_batches >= num_batches

        wait_until(has_trained, f"{num_batches} batches on {world_size} ranks after {after!r}", _PATIENCE_S)
        return found[0]

    def logs(self) -> str:
        """Return the end of what each agent and its ranks have printed."""
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("agent-*.log")))
