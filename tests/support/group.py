"""Ranks that need the same data: real processes, with a script for each, and what they report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from tests.support.helpers import ROOT

LIMIT_S = 50.0

PRELUDE = """
    import faulthandler, hashlib, json, os, signal, sys, threading, time, warnings
    from datetime import timedelta
    from functools import partial
    import numpy as np
    import torch
    import torch.distributed as dist
    from swift_loader import *

    rank, num_ranks, folder, patience_s = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    faulthandler.dump_traceback_later(100, exit=True)
    patience = timedelta(seconds=patience_s)
    dist.init_process_group("gloo", f"file://{folder}/store", patience, world_size=num_ranks, rank=rank)
    warnings.simplefilter("ignore")

    class Dataset:
        def __init__(self, length=96, shape=(40, 50), bad=-1, pause_s=0.0):
            self.length, self.shape, self.bad, self.pause_s = length, shape, bad, pause_s
        def __len__(self):
            return self.length
        def __getitem__(self, index):
            with open(f"{folder}/fetched", "a") as file:
                file.write(f"{index}\\n")
            if index == self.bad:
                raise ValueError(f"sample {index} is bad")
            if self.pause_s:
                time.sleep(self.pause_s)
            return {"x": np.full(self.shape, index, np.float32) + np.float32(np.random.random()), "index": index}

    def make(dataset=None, **options):
        told = {"batch_size": 8, "worker_per_consumer": 2, "seed": 5, **options}
        return SwiftLoader(Dataset, dataset or {}, **told)

    def digest(batch):
        return hashlib.blake2b(batch["x"].tobytes() + batch["index"].tobytes(), digest_size=8).hexdigest()

    def report(value):
        print(json.dumps(value), flush=True)

    def outcome(call):
        try:
            return call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def num_fetched():
        try:
            return len(open(f"{folder}/fetched").readlines())
        except FileNotFoundError:
            return 0

    def finish():
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
"""


def start_ranks(script: str, num_ranks: int, folder: Path, patience_s: int = 30) -> list[subprocess.Popen[str]]:
    """Start ranks that run this script after `PRELUDE`, and wait so long for one another."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(PRELUDE) + textwrap.dedent(script))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SWIFT_LOADER_ROOT": "0"}
    return [
        subprocess.Popen(
            [sys.executable, str(path), str(rank), str(num_ranks), str(folder), str(patience_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(num_ranks)
    ]


def end_ranks(
    ranks: list[subprocess.Popen[str]], killed: tuple[int, ...] = (), limit_s: float = LIMIT_S
) -> list[list[Any]]:
    """Wait for ranks that were started. Return what each has reported; those that were killed may have failed."""
    reports = []
    try:
        for number, rank in enumerate(ranks):
            out, err = rank.communicate(timeout=limit_s)
            assert rank.returncode == 0 or number in killed, f"rank {number}: {err}"
            reports.append([json.loads(line) for line in out.splitlines()])
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()
    return reports


def run_ranks(
    script: str,
    num_ranks: int,
    folder: Path,
    killed: tuple[int, ...] = (),
    patience_s: int = 30,
    limit_s: float = LIMIT_S,
) -> list[list[Any]]:
    """Run ranks with this script, and return what each has reported."""
    return end_ranks(start_ranks(script, num_ranks, folder, patience_s), killed, limit_s)
