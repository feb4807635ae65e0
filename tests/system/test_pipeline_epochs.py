"""set_epoch of a pipeline reaches its sources, wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from swift_loader.pipeline import Pipeline, StageLoader


class OfEpochs:
    """A source whose items say the epoch that it was told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[str, int]]:
        yield self.name, self.epoch


JOINED: dict[str, Callable[[Pipeline, Pipeline], Pipeline]] = {
    "in turn": lambda one, other: one.merge(other),
    "as ready": lambda one, other: one.merge(other, output_order="completion"),
    "mixed": lambda one, other: Pipeline.mix([one, other], [1, 3]),
    "mixed, of merged ones": lambda one, other: Pipeline.mix([one.merge(other)]),
}


@pytest.mark.parametrize("join", JOINED)
def test_set_epoch_reaches_the_sources_inside_joined_pipelines(join: str) -> None:
    one, other = Pipeline(OfEpochs("one")), Pipeline(OfEpochs("other")).map(lambda item: item)
    pipeline = JOINED[join](one.shuffle(2), other).prefetch(2)
    for epoch in (5, 2):
        pipeline.set_epoch(epoch)
        assert sorted(pipeline) == [("one", epoch), ("other", epoch)]


def test_set_epoch_of_a_stage_loader_reaches_its_source() -> None:
    loader = StageLoader(OfEpochs("one"))
    loader.set_epoch(3)
    assert list(loader) == [("one", 3)]


def test_a_source_without_set_epoch_needs_none() -> None:
    pipeline = Pipeline(range(3)).merge(Pipeline(OfEpochs("one")))
    pipeline.set_epoch(4)
    assert list(pipeline) == [0, ("one", 4), 1, 2]


@pytest.mark.parametrize("wrong", [range(3), None])
def test_what_is_no_pipeline_cannot_be_joined(wrong: object) -> None:
    for join in (Pipeline(range(2)).merge, lambda other: Pipeline.mix([other])):
        with pytest.raises(TypeError, match="can't be merged or mixed; make a Pipeline of it"):
            join(wrong)  # type: ignore[arg-type]
