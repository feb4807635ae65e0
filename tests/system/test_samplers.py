"""Samplers of two real ranks, without a seed: rank 0's is everyone's, also if it isn't known when they are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.group import run_ranks

NUM_SAMPLES = 60

RANK = """
    from torch.utils.data import BatchSampler, WeightedRandomSampler

    torch.manual_seed(40 + rank)
    lengths = [1 + number % 13 for number in range(60)]
    samplers = {
        "shuffle": ShuffleBatchSampler(60, 5),
        "buckets": LengthBucketBatchSampler(lengths, 5),
        "tokens": TokenBudgetBatchSampler(lengths, 40),
        "weighted": distributed(BatchSampler(WeightedRandomSampler([1.0] * 60, 60), 5, drop_last=False)),
    }
    dist.destroy_process_group()
    samplers |= {
        "shuffle, early": ShuffleSampler(60, 5),
        "tokens, early": TokenBudgetBatchSampler(lengths, 40),
        "strata, early": StratifiedBatchSampler(lengths, 5),
        "weighted, early": distributed(BatchSampler(WeightedRandomSampler([1.0] * 60, 60), 5, drop_last=False)),
    }
    dist.init_process_group("gloo", f"file://{folder}/later", patience, world_size=num_ranks, rank=rank)
    report({name: [list(sampler), sampler.state_dict()["seed"]] for name, sampler in samplers.items()})
    finish()
"""


@pytest.mark.slow
def test_ranks_without_a_seed_share_that_of_rank_0(tmp_path: Path) -> None:
    answers = [found for [found] in run_ranks(RANK, 2, tmp_path)]
    for name in answers[0]:
        (first, seed), (second, other_seed) = (answer[name] for answer in answers)
        assert seed == other_seed == 40
        assert len(first) == len(second)
        indices = {index for item in first + second for index in (item if isinstance(item, list) else [item])}
        if "weighted" not in name:
            assert indices == set(range(NUM_SAMPLES))
        assert first != second
