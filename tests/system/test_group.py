"""Ranks of one node that need the same data: loaded once, the same bytes, and each rank with a loop of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.group import run_ranks

SCENARIOS = """
    def epochs():
        found = []
        with make(nearby_shuffle=40) as loader:
            loader.start(rank=0, world_size=1)
            for epoch in range(3):
                digests = []
                for batch in loader:
                    digests.append(digest(batch))
                    batch["x"][:] = 100 + rank  # shows on no other rank
                    if epoch == 1 and len(digests) == 5:
                        break
                found.append(digests)
        return found

    def resume():
        with make() as loader:
            loader.start(rank=0, world_size=1)
            batches = iter(loader)
            first = [digest(next(batches)) for _ in range(4)]
            state = loader.state_dict()
            rest = [digest(batch) for batch in batches]
            loader.load_state_dict(state)
            again = [digest(batch) for batch in loader]
            assert again == rest
            loader.skip([1, 2])
            return [first, rest, [digest(batch) for batch in loader]]

    def inline():
        with make({"shape": ()}) as loader:
            loader.start(rank=0, world_size=1)
            return [digest(batch) for batch in loader]

    def mesh():
        from torch.distributed.device_mesh import init_device_mesh
        with make() as loader:
            loader.start(mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")))
            return [digest(batch) for batch in loader]

    def bad_sample():
        with make({"bad": 20}, shuffle=False) as loader:
            loader.start(rank=0, world_size=1)
            batches = iter(loader)
            digests = [digest(next(batches)) for _ in range(2)]
            error = outcome(lambda: next(batches))
            return [digests, error]

    def skipped_samples():
        with make({"bad": 20}, shuffle=False, on_error="skip") as loader:
            loader.start(rank=0, world_size=1)
            digests = [digest(batch) for batch in loader]
            return [digests, [failure.index for failure in loader.failures]]

    def out_of_order():
        with make(in_order=False) as loader:
            return outcome(lambda: loader.start(rank=0, world_size=1))

    def kept():
        with make() as loader:
            loader.start(rank=0, world_size=1)
            batches = list(loader)
            return [digest(batch) for batch in batches]

    def own_definitions():
        with make(collate_fn=lambda samples: [Sample(**sample) for sample in samples]) as loader:
            loader.start(rank=0, world_size=1)
            return [[type(one) is Sample and one.index for one in batch] for batch in loader]

    class Sample:
        def __init__(self, x, index):
            self.x, self.index = x, int(index)

    def without_sharing():
        before = num_fetched()
        dist.barrier()
        with make() as loader:
            loader.start(rank=0, world_size=1, share_batches=False)
            digests = [digest(batch) for batch in loader]
            dist.barrier()
            return [digests, num_fetched() - before]

    before = num_fetched()
    for scenario in (epochs, resume, inline, mesh, bad_sample, skipped_samples, out_of_order, kept, own_definitions):
        report([scenario.__name__, outcome(scenario)])
        dist.barrier()
    report(["without_sharing", without_sharing()])
    dist.barrier()
    with make() as loader:
        before = num_fetched()
        dist.barrier()
        loader.start(rank=0, world_size=1)
        num = sum(1 for _ in range(3) for _ in loader)
        dist.barrier()
        report(["fetched", [num, num_fetched() - before]])
        dist.barrier()
    report(["threads", sorted(thread.name for thread in threading.enumerate())])
    finish()
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has reported, by scenario."""
    return [dict(reported) for reported in run_ranks(SCENARIOS, 2, tmp_path_factory.mktemp("group"))]


def both(outcomes: list[dict[str, Any]], name: str) -> Any:
    """Return what a scenario gave, which is the same on both ranks."""
    assert outcomes[0][name] == outcomes[1][name]
    return outcomes[0][name]


def test_both_ranks_get_the_same_bytes_and_writing_into_a_batch_shows_on_no_other(outcomes: Any) -> None:
    epochs = both(outcomes, "epochs")
    assert [len(digests) for digests in epochs] == [12, 5, 12]
    assert len({digest for digests in epochs for digest in digests}) == 29


def test_a_resumed_run_continues_on_both_also_with_steps_left_out(outcomes: Any) -> None:
    first, rest, second = both(outcomes, "resume")
    assert [len(first), len(rest), len(second)] == [4, 8, 10]


@pytest.mark.parametrize("name", ["inline", "mesh", "kept"])
def test_batches_are_the_same(outcomes: Any, name: str) -> None:
    assert len(set(both(outcomes, name))) == 12


def test_a_mesh_gives_the_bytes_that_its_coordinate_gives(outcomes: Any) -> None:
    assert both(outcomes, "mesh") == both(outcomes, "without_sharing")[0]


def test_an_error_of_the_dataset_comes_in_place_of_its_batch_on_both(outcomes: Any) -> None:
    digests, error = both(outcomes, "bad_sample")
    assert len(digests) == 2
    assert error == "ValueError: sample 20 is bad"


def test_failed_samples_are_reported_on_both(outcomes: Any) -> None:
    digests, indices = both(outcomes, "skipped_samples")
    assert (len(digests), indices) == (12, [20])


def test_batches_out_of_order_are_not_shared(outcomes: Any) -> None:
    assert "in_order=True, or start(share_batches=False)" in both(outcomes, "out_of_order")


def test_classes_of_the_script_arrive_as_such(outcomes: Any) -> None:
    batches = both(outcomes, "own_definitions")
    assert sorted(index for batch in batches for index in batch) == list(range(96))


def test_each_sample_is_fetched_once_for_both(outcomes: Any) -> None:
    num_batches, num_fetched = both(outcomes, "fetched")
    assert num_batches == 36
    assert num_fetched <= 8 * (36 + 10) + 16  # the batches in flight, and the samples that the builds are compared by
    assert both(outcomes, "without_sharing")[1] >= 2 * 96


def test_no_thread_of_a_closed_loader_is_left(outcomes: Any) -> None:
    assert not [name for reported in outcomes for name in reported["threads"] if name.startswith("swift_loader")]
