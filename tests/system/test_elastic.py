"""Ranks of two nodes: what they train though some die, and what they say if they disagree."""

from __future__ import annotations

import os
import signal
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest

from tests.support.elastic import Attempt, Cluster, attempts_in, surviving
from tests.support.helpers import exhaustive

NUM_SAMPLES = 1438
"""The training part of the digits."""

NUM_EPOCHS = 2
WORLD_SIZES = (4, 3, 2, 4)

LIMIT_S = 1500
"""With other work on two cores, a restart took 18 to 40 s."""

TRAINING = [f"--epochs={NUM_EPOCHS}", "--batch-size=8", "--workers=1", "--save-every=2"]
NUM_FREE = 5
"""Batches that a start trains before it waits to be killed. It saves after 2 and 4, and has delivered more by then."""

NUM_CASES = 3
NUM_IDS = 64

pytestmark = [
    pytest.mark.timeout(LIMIT_S),
    pytest.mark.skipif(find_spec("sklearn") is None, reason="the example needs sklearn: pip install scikit-learn"),
]


def kill_one(attempt: Attempt, random: Random) -> None:
    rank = random.choice(sorted(attempt.ranks))
    os.kill(attempt.ranks[rank][0]["pid"], signal.SIGKILL)


@pytest.mark.parametrize(
    ("num_kills", "worker_type"), [exhaustive((1, 1, 0, 1), "thread"), exhaustive((3, 3, 2, 2), "process")]
)
def test_checkpoints_have_seen_each_sample_once_though_ranks_die_and_nodes_come_and_go(
    num_kills: tuple[int, ...], worker_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWIFT_LOADER_TESTS_WORKER_TYPE", worker_type)  # for the ranks
    random, last = Random(sum(num_kills)), ""
    with Cluster(tmp_path, "elastic_script.py", [str(NUM_FREE), f"--save={tmp_path}/saved", *TRAINING]) as cluster:
        first, other = cluster.add_node(2), None
        for world_size, num_here in zip(WORLD_SIZES, num_kills, strict=True):
            if other is not None:
                cluster.end_node(other)
            other = cluster.add_node(world_size - 2) if world_size > 2 else None
            for _ in range(num_here):
                attempt = cluster.trained(world_size, last, random.randint(3, NUM_FREE))
                kill_one(attempt, random)
                last = attempt.name
            last = cluster.trained(world_size, last, 3).name
        (tmp_path / "go").touch()
        assert other is not None
        assert [agent.wait(LIMIT_S / 5) for agent in (first, other)] == [0, 0], cluster.logs()
        assert "of 359 digits" in cluster.logs()
    attempts = attempts_in(tmp_path)
    assert len(attempts) >= sum(num_kills) + len(WORLD_SIZES)
    assert Counter(surviving(attempts)) == Counter(
        (epoch, index) for epoch in range(NUM_EPOCHS) for index in range(NUM_SAMPLES)
    )
    delivered = sum(len(line["ids"]) for attempt in attempts for lines in attempt.ranks.values() for line in lines[1:])
    assert delivered > NUM_EPOCHS * NUM_SAMPLES  # some batches were trained after the last checkpoint, and again


@pytest.mark.slow
def test_ranks_of_two_nodes_name_the_rank_that_differs_or_is_missing_and_agree_after_a_restart(tmp_path: Path) -> None:
    with Cluster(tmp_path, "disagreeing_script.py", []) as cluster:
        agents = [cluster.add_node(2), cluster.add_node(2)]
        assert [agent.wait(LIMIT_S / 5) for agent in agents] == [0, 0], cluster.logs()
    reports = [
        [(tmp_path / f"attempt-{attempt}-{rank}.txt").read_text() for rank in range(4)] for attempt in range(NUM_CASES)
    ]
    assert all(report.startswith("rank 3 has seed=8, but rank 0 has seed=7") for report in reports[0]), reports
    assert all("rank 2 hasn't within" in report or "stopped waiting" in report for report in _without(reports[1], 2))
    assert any("but rank 2 hasn't within" in report for report in reports[1]), reports
    ids = [int(number) for report in reports[2] for number in report.split()]
    assert sorted(ids) == list(range(NUM_IDS))


def _without(reports: list[str], rank: int) -> list[str]:
    return reports[:rank] + reports[rank + 1 :]
