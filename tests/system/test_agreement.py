"""Ranks that were told different things find out before any data goes different ways. Two real ranks, one launch."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.group import run_ranks
from tests.support.helpers import ROOT, once_in_a_run, run_script

pytestmark = pytest.mark.timeout(120)  # the first test waits for the ranks

Options = dict[str, Any]

SCENARIOS: dict[str, tuple[Options, Options]] = {
    "no seed": ({}, {}),
    "the same seed": ({"seed": 5}, {"seed": 5}),
    "seeds": ({"seed": 5}, {"seed": 6}),
    "a seed on one rank": ({"seed": 5}, {}),
    "batch sizes": ({"batch_size": 4}, {"batch_size": 8}),
    "windows": ({"nearby_shuffle": 0}, {"nearby_shuffle": 40}),
    "shuffle": ({"shuffle": True}, {"shuffle": False}),
    "uneven": ({"uneven": "pad"}, {"uneven": "exact"}),
    "bad samples": ({}, {"on_error": "skip"}),
    "epochs": ({"epoch": 0}, {"epoch": 1}),
    "positions": ({"position": 8}, {"position": 16}),
    "skips": ({"skip_steps": [1]}, {"skip_steps": [2]}),
    "a skip on one rank": ({}, {"skip_steps": [1]}),
    "the same skips": ({"skip_steps": [2, 1]}, {"skip_steps": [1, 2]}),
    "exclusions": ({"exclude": [1, 2]}, {"exclude": [2]}),
    "the same exclusions": ({"exclude": [2, 1]}, {"exclude": [1, 2, 2]}),
    "lengths": ({"length": 50}, {"length": 51}),
    "other numbers of workers": ({"worker_per_consumer": 0}, {"worker_per_consumer": 1}),
    "the same index": ({"nb_consumer": 2, "index": 0}, {"nb_consumer": 2, "index": 0}),
    "indices the other way round": ({"nb_consumer": 2, "index": 1}, {"nb_consumer": 2, "index": 0}),
    "no dataset on one rank": ({}, {"length": -1}),
    "torch seeded by rank": ({"torch_seed": 40}, {"torch_seed": 41}),
    "no seed, once more": ({}, {}),
    "only one rank": ({}, {"skip": True}),  # last: the ranks are out of step afterwards
}

RANK = """
    for name, options in json.loads(SCENARIOS).items():
        told = {"batch_size": 4, "worker_per_consumer": 0, **options[rank]}
        if "torch_seed" in told:
            torch.manual_seed(told.pop("torch_seed"))
        length, epoch, position = told.pop("length", 50), told.pop("epoch", 0), told.pop("position", 0)
        skip_steps, rows = told.pop("skip_steps", None), told.pop("exclude", None)
        if told.pop("skip", False):
            continue
        index = told.pop("index", None)
        with SwiftLoader(lambda: range(length) if length >= 0 else 1 / 0, **told) as loader:
            if position:
                loader.load_state_dict({**loader.state_dict(), "seed": 1, "position": position})
            loader.set_epoch(epoch)
            if skip_steps:
                loader.skip(skip_steps)
            if rows:
                loader.exclude(rows)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = outcome(lambda: loader.start(index))
            if result is None:
                result = [loader.state_dict()["seed"], next(iter(loader)).tolist()]
        report([name, result, [str(warning.message) for warning in caught]])
    finish()
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank got, by scenario."""
    script = f"SCENARIOS = {json.dumps(SCENARIOS)!r}\n" + textwrap.dedent(RANK)
    folder = tmp_path_factory.mktemp("ranks")
    found: dict[str, list[Any]] = {name: [] for name in SCENARIOS}
    for reported in once_in_a_run(tmp_path_factory, "ranks", lambda: run_ranks(script, 2, folder, patience_s=8)):
        for name, *outcome in reported:
            found[name].append(outcome)
    return found


@pytest.mark.parametrize(
    "name",
    [
        "no seed",
        "the same seed",
        "the same skips",
        "the same exclusions",
        "other numbers of workers",
        "indices the other way round",
        "torch seeded by rank",
        "no seed, once more",
    ],
)
def test_ranks_that_agree_share_one_order(outcomes: dict[str, list[Any]], name: str) -> None:
    ((seed, first), warned), ((other_seed, second), warned_too) = outcomes[name]
    assert warned == warned_too == []
    assert seed == other_seed
    assert len(set(first + second)) == 8


def test_where_torch_was_seeded_by_rank_all_have_that_of_rank_0(outcomes: dict[str, list[Any]]) -> None:
    assert [outcome[0] for outcome, _ in outcomes["torch seeded by rank"]] == [40, 40]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("seeds", "rank 1 has seed=6, but rank 0 has seed=5"),
        ("a seed on one rank", 'rank 1 has seed="rank 0\'s", but rank 0 has seed=5'),
        ("batch sizes", "rank 1 has batch_size=8, but rank 0 has batch_size=4"),
        ("windows", "rank 1 has nearby_shuffle=40, but rank 0 has nearby_shuffle=0"),
        ("shuffle", "rank 1 has shuffle=False, but rank 0 has shuffle=True"),
        ("uneven", "rank 1 has uneven='exact', but rank 0 has uneven='pad'"),
        ("bad samples", "rank 1 has on_error='skip', but rank 0 has on_error='raise'"),
        ("epochs", "rank 1 has epoch=1, but rank 0 has epoch=0"),
        ("positions", "rank 1 has position=16, but rank 0 has position=8"),
        ("skips", "rank 1 has skipped='[[0, 16, 24]]', but rank 0 has skipped='[[0, 8, 16]]'"),
        ("a skip on one rank", "rank 1 has skipped='[[0, 8, 16]]', but rank 0 has skipped='[]'"),
        ("exclusions", "rank 1 has excluded='1 rows ("),
        ("lengths", "rank 1 has len(dataset)=51, but rank 0 has len(dataset)=50"),
    ],
)
def test_ranks_that_differ_all_get_the_error(outcomes: dict[str, list[Any]], name: str, message: str) -> None:
    expected = f"ValueError: {message}: they would" if name != "exclusions" else f"ValueError: {message}"
    assert [outcome.startswith(expected) for outcome, _ in outcomes[name]] == [True, True]


def test_two_ranks_with_one_index_both_get_the_error(outcomes: dict[str, list[Any]]) -> None:
    for outcome, _ in outcomes["the same index"]:
        assert outcome.startswith("ValueError: the ranks were started with consumer_index=[0, 0]")


def test_a_rank_whose_dataset_can_not_be_built_lets_nobody_wait(outcomes: dict[str, list[Any]]) -> None:
    (first, _), (second, _) = outcomes["no dataset on one rank"]
    assert first.startswith("ValueError: rank 1 has len(dataset)='none, because of ZeroDivisionError', but rank 0 has")
    assert second.startswith("ZeroDivisionError")


def test_a_rank_that_never_comes_is_named_after_the_time_out(outcomes: dict[str, list[Any]]) -> None:
    ((outcome, (warning,)),) = outcomes["only one rank"]
    assert "rank 1 hasn't" in warning
    assert "nb_consumer=1" in warning
    assert outcome.startswith(
        "RuntimeError: this rank has started its loader, but rank 1 hasn't within 8 s: all ranks must"
    )


LAUNCHED = """
    import sys, warnings
    from swift_loader import SwiftLoader
    warnings.simplefilter("error")
    loader = SwiftLoader(dataset=range(50), batch_size=4, worker_per_consumer=0, **eval(sys.argv[1]))
    try:
        print(next(iter(loader)).tolist())
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("{'seed': 3, 'shuffle': False}", "[4, 5, 6, 7]\n"),
        ("{}", "there are 2 consumers, but no seed was given, and this process can't get one from the others"),
    ],
)
def test_launched_ranks_that_can_not_talk_need_a_seed(options: str, expected: str, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(ROOT), "RANK": "1", "WORLD_SIZE": "2"}
    assert run_script(LAUNCHED, options, folder=tmp_path, environment=environment).startswith(expected)
