"""Samplers of two real ranks, without a seed: rank 0's is everyone's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import HANG_S, ROOT

NUM_SAMPLES = 60

RANK = """
    import json, sys
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from torch.utils.data import BatchSampler, WeightedRandomSampler
    from swift_loader import *

    rank = int(sys.argv[1])
    dist.init_process_group("gloo", f"file://{sys.argv[2]}", timedelta(seconds=20), world_size=2, rank=rank)
    torch.manual_seed(40 + rank)
    lengths = [1 + number % 13 for number in range(60)]
    samplers = {
        "shuffle": ShuffleBatchSampler(60, 5),
        "buckets": LengthBucketBatchSampler(lengths, 5),
        "tokens": TokenBudgetBatchSampler(lengths, 40),
        "weighted": distributed(BatchSampler(WeightedRandomSampler([1.0] * 60, 60), 5, drop_last=False)),
    }
    print(json.dumps({name: [list(sampler), sampler.state_dict()["seed"]] for name, sampler in samplers.items()}))
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_without_a_seed_share_that_of_rank_0(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("\n".join(line[4:] for line in RANK.splitlines()))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "meeting")],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        answers: list[dict[str, Any]] = [json.loads(rank.communicate(timeout=HANG_S)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for name in answers[0]:
        (first, seed), (second, other_seed) = (answer[name] for answer in answers)
        assert seed == other_seed == 40
        assert len(first) == len(second)
        indices = {index for batch in first + second for index in batch}
        if name != "weighted":
            assert indices == set(range(NUM_SAMPLES))
        assert first != second
