"""A rank of examples/elastic_example.py that writes down what it gets, and waits before its training is over.

Arguments: a folder, how many batches each start may train before the file `go` is there, and the example's arguments.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import distributed

from swift_loader import SwiftLoader
from tests.support.helpers import ROOT, WORKER_TYPE

FOLDER, NUM_FREE = Path(sys.argv[1]), int(sys.argv[2])


class Attempt:
    """One start of all ranks. Goes into each checkpoint; and each rank writes a file of its own, a line per batch."""

    def __init__(self) -> None:
        self.resumed: str | None = None
        self.name = ""
        self.num_batches = 0
        self._path = FOLDER

    def state_dict(self) -> dict[str, str]:
        return {"name": self.name}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.resumed = state["name"]

    def begin(self, position: tuple[int, int]) -> None:
        """Name this start the same on all ranks, and write the first line: who this is, and where it resumes."""
        names = [f"{time.monotonic():020.6f}"]
        distributed.broadcast_object_list(names)
        self.name = names[0]
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
        self._path = FOLDER / f"attempt-{self.name}-{rank}.jsonl"
        self.write({"world_size": world_size, "pid": os.getpid(), "from": self.resumed, "at": position})

    def write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def wait_for_go(self) -> None:
        """Block after so many batches until the test lets the ranks finish, or kills one. Ends with the parent."""
        self.num_batches += 1
        parent = os.getppid()
        while self.num_batches > NUM_FREE and not (FOLDER / "go").exists() and os.getppid() == parent:
            time.sleep(0.02)


ATTEMPT = Attempt()


class RecordedLoader(SwiftLoader):
    """Notes the dataset indices of each batch before the loop gets it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, worker_type=WORKER_TYPE, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if not ATTEMPT.name:
            ATTEMPT.begin(_position(self))
        for batch in super().__iter__():
            indices = self.batch_indices
            assert indices is not None
            ids = indices.tolist()[: len(indices) - self.num_padding]
            ATTEMPT.write({"ids": ids, "after": _position(self)})
            yield batch
            ATTEMPT.wait_for_go()


def _position(loader: SwiftLoader) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["position"]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "examples"))
    elastic_example = import_module("elastic_example")
    parser = elastic_example.make_parser(None)
    elastic_example.run(parser.parse_args(sys.argv[3:]), RecordedLoader, attempt=ATTEMPT)
