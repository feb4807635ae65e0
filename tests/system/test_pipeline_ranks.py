"""Pipelines on several ranks: they end together, and their states go from one number of ranks to another."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from swift_loader.pipeline import Pipeline, StageLoader
from tests.support.group import run_ranks
from tests.support.stage_functions import Counted

TOGETHER = """
    import itertools
    from swift_loader.pipeline import Pipeline

    def fails(number):
        return number // (number % 6)  # on rank 0 only

    MAKES = {
        "skip": lambda pipe: pipe.shard().map(fails, on_error="skip").batch(2),
        "filter": lambda pipe: pipe.shard().filter(lambda number: number % 6).batch(2).prefetch(2),
        "unbatch": lambda pipe: pipe.shard().map(lambda number: [number] * (number % 2 + 1)).unbatch().batch(2),
        "own": lambda pipe: Pipeline(range(7 + rank), equal_batches=True).merge(Pipeline(range(3))),
    }
    found = {}
    for name, make in MAKES.items():
        for continuous in (False, True):
            with make(Pipeline(range(24), equal_batches=True, continuous=continuous)) as pipe:
                epochs = [list(pipe), list(pipe)]
                state = pipe.state_dict()
                first = list(itertools.islice(pipe, 2))
                middle = pipe.state_dict()
            numbers = [len(epoch) for epoch in epochs]
            for begun, saved in (([], state), (first, middle)):
                with make(Pipeline(range(24), equal_batches=True, continuous=continuous)) as pipe:
                    pipe.load_state_dict(saved)
                    rest = list(pipe)
                    numbers.append(begun + rest == epochs[0] and pipe.state_dict()["epoch"] == 3)
            found[f"{name} {continuous}"] = numbers

    def some(number):
        if number == 9:  # on rank 1 only
            raise LookupError("bad")
        return number

    pipe = Pipeline(range(24), equal_batches=True).shard().map(some)
    for where in ("stage", "state"):
        for again in range(2):
            found[f"{where} {again}"] = outcome(lambda: list(pipe))
        if rank == 0:
            pipe = Pipeline([0], equal_batches=True)
        else:
            pipe = Pipeline([0, 1], equal_batches=True)
            next(iter(Pipeline([0, 1, 2])))
            pipe.load_state_dict({**pipe.state_dict(), "place": [1], "lengths": [3]})
    report(found)
    finish()
"""


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_ranks_end_together(tmp_path: Path) -> None:
    zero, one = ({**found} for [found] in run_ranks(TOGETHER, 2, tmp_path))
    nums = {"skip": 4, "filter": 4, "unbatch": 6, "own": 10}
    expected = {f"{name} {flag}": [num, num, True, True] for name, num in nums.items() for flag in (False, True)}
    for found in (zero, one):
        assert {name: found.pop(name) for name in expected} == expected
    assert [text.partition(":")[0] for text in one.values()] == ["LookupError"] * 2 + ["StateMismatch"] * 2
    places = ("4 of epoch 0", "4 of epoch 1", "0 of epoch 0", "0 of epoch 1")
    for place, text in zip(places, zero.values(), strict=True):
        assert f"RankMismatch: rank 1 has ended its loop by an error before batch {place}." in text


def test_all_keys_of_a_state_are_there_from_the_beginning() -> None:
    """torch.distributed.checkpoint loads only these, and takes dicts and lists of dicts apart."""

    def keys(pipeline: Pipeline) -> list[str]:
        return [*flatten_state_dict({"loader": pipeline.state_dict()})[0]]

    def make() -> Pipeline:
        joined = Pipeline(Counted(96), seed=1).merge(Pipeline(range(9)).shuffle(3), Pipeline(Counted(9)))
        return joined.shard(0, 2).filter(bool)

    fresh, pipeline = make(), make()
    list(itertools.islice(pipeline, 17))
    assert pipeline.state_dict()["sources"][0] is not None
    assert keys(pipeline) == keys(fresh)


CHECKPOINT = """
    import itertools
    import torch.distributed.checkpoint as dcp
    from swift_loader.pipeline import Pipeline
    from tests.support.stage_functions import Counted

    MAKES = {
        "sharded": lambda: Pipeline(Counted(96), seed=1).shuffle(9).shard().batch(2),
        "mixed": lambda: Pipeline.mix([Pipeline(Counted(60)), Pipeline(range(60, 96))], [2, 1]).shard().batch(2),
        "counting": lambda: Pipeline(range(96), seed=1).shard().shuffle(9),
    }
    for name, make in MAKES.items():
        pipe = make()
        if num_ranks == %d:
            taken = list(itertools.islice(pipe, 6))
            dcp.save({"loader": pipe}, checkpoint_id=f"{folder}/{name}")
            pipe.close()
        else:
            dcp.load({"loader": pipe}, checkpoint_id=f"{folder}/{name}")
            taken = outcome(lambda: list(pipe))
        report(taken)
    finish()
"""


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("num_ranks", [(1, 2), (2, 1)])
def test_a_distributed_checkpoint_goes_to_another_number_of_ranks(num_ranks: tuple[int, int], tmp_path: Path) -> None:
    answers = []
    for num in num_ranks:
        (tmp_path / "store").unlink(missing_ok=True)
        answers += run_ranks(CHECKPOINT % num_ranks[0], num, tmp_path)
    for taken in zip(*(answer[:2] for answer in answers), strict=True):
        assert sorted(number for batches in taken for batch in batches for number in batch) == [*range(96)]
    for text in (answer[2] for answer in answers[num_ranks[0] :]):
        assert text.startswith(f"StateMismatch: the state was saved on rank 0 of {num_ranks[0]}, but this is shard")


@pytest.mark.parametrize("make", [Pipeline, StageLoader])
def test_ranks_that_cannot_talk_are_told_to(make: Any) -> None:
    pipeline = make(range(9), equal_batches=True).shard(0, 2)
    with pytest.raises(ValueError, match=r"equal_batches=True needs torch\.distributed, because shard\(\) counts 2"):
        next(iter(pipeline))
    assert list(make(range(9), equal_batches=True)) == [*range(9)]
    with pytest.raises(TypeError, match="equal_batches=1 is a int"):
        make([], equal_batches=1)
