"""Ranks that need the same data: loaded once, and the same bytes in the loops of all."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from swift_loader.executors.broadcast import START, Broadcast
from tests.support.group import run_ranks
from tests.support.helpers import once_in_a_run

pytestmark = pytest.mark.timeout(150)  # the ranks may take LIMIT_S

SCENARIOS = """
    from torch.distributed.device_mesh import init_device_mesh
    two_by_tensor = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

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
        with make() as loader:
            loader.start(mesh=two_by_tensor)
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
            lines = str(loader.report()).splitlines()
            report(["lines", lines])
            return [digest(batch) for batch in batches]

    def ahead():
        digests = []
        with make(max_nb_batch_on_device=2 + rank) as loader:
            loader.start(rank=0, world_size=1, device="cpu")
            for batch in loader:
                dist.barrier()  # as a step's collectives
                digests.append(digest({name: tensor.numpy() for name, tensor in batch.items()}))
        with make(max_nb_batch_on_device=3) as loader:
            loader.start(rank=0, world_size=1, device="cpu" if rank else None)
            for batch in loader:
                dist.barrier()
                digests.append(int(batch["index"][0]))
        return digests

    def files():
        with make(benchmark_file=f"{folder}/times.json", logger=f"{folder}/run") as loader:
            loader.start(rank=0, world_size=1)
            num = sum(1 for _ in loader)
        dist.barrier()
        written = sorted(name for name in os.listdir(folder) if name.startswith(("times", "run")))
        dist.barrier()  # before the next loader of the other rank
        return [num, written]

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

    report(["without_sharing", without_sharing()])
    dist.barrier()
    for scenario in (epochs, resume, inline, mesh, bad_sample, skipped_samples, out_of_order, kept, ahead, files,
                     own_definitions):
        report([scenario.__name__, outcome(scenario)])
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
    folder = tmp_path_factory.mktemp("group")
    return once_in_a_run(tmp_path_factory, "group", lambda: [dict(one) for one in run_ranks(SCENARIOS, 2, folder)])


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
    assert both(outcomes, "mesh") == outcomes[0]["without_sharing"][0] == outcomes[1]["without_sharing"][0]


def test_batches_are_taken_ahead_in_step_however_many_each_rank_wants(outcomes: Any) -> None:
    digests = both(outcomes, "ahead")
    assert digests[:12] == outcomes[0]["kept"]
    assert len(digests) == 24


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
    assert [reported["fetched"][0] for reported in outcomes] == [36, 36]
    num_fetched = max(reported["fetched"][1] for reported in outcomes)
    assert num_fetched <= 8 * (36 + 10) + 16  # the batches in flight, and the samples that the builds are compared by
    assert max(reported["without_sharing"][1] for reported in outcomes) >= 2 * 96


def test_only_the_rank_that_loads_measures_how(outcomes: Any) -> None:
    assert "2 worker processes" in outcomes[0]["lines"][1]
    assert len(outcomes[1]["lines"]) == 1


def test_each_rank_writes_files_of_its_own(outcomes: Any) -> None:
    names = ["run_rank0.log", "run_rank1.log", "times.json", "times_rank1.json"]
    assert both(outcomes, "files") == [12, names]


def test_nothing_of_a_closed_loader_is_left(outcomes: Any) -> None:
    for reported in outcomes:
        assert not [name for name in reported["threads"] if name.startswith("swift_loader")]


TROUBLES = """
    def elsewhere():
        with make() as loader:
            loader.start(rank=0, world_size=1)
            batches = iter(loader)
            for _ in range(4):
                next(batches)
            if rank == 1:
                loader.load_state_dict({**loader.state_dict(), "position": 8})
                batches = iter(loader)
            first = outcome(lambda: next(batches))
            return [first, outcome(lambda: next(iter(loader)))]

    def another_break():
        with make() as loader:
            loader.start(rank=0, world_size=1)
            batches = iter(loader)
            for _ in range(4 + 2 * rank):
                next(batches)
            loader.set_epoch(1)
            return outcome(lambda: next(iter(loader)))

    def stays_away(whose):
        with make(timeout=1.5) as loader:
            loader.start(rank=0, world_size=1)
            batches = iter(loader)
            next(batches)
            found = None if rank == whose else outcome(lambda: next(batches))
            dist.barrier()
            return found or outcome(lambda: next(batches))

    def closes(whose):
        loader = make()
        loader.start(rank=0, world_size=1)
        batches = iter(loader)
        next(batches)
        if rank == whose:
            loader.close()
            return None
        found = outcome(lambda: next(batches))
        loader.close()
        return found

    def worker_dies():
        with make({"pause_s": 0.002}) as loader:
            loader.start(rank=0, world_size=1)
            digests = []
            for batch in loader:
                digests.append(digest(batch))
                if rank == 0 and len(digests) == 3:
                    workers = loader._session.engine._executor.fleet.workers
                    os.kill(next(iter(workers.values())).process.pid, signal.SIGKILL)
            restarts = loader.report()["worker_restarts"]
        return [digests, restarts]

    def gives_up():
        with make({"pause_s": 0.01}, worker_restarts=0) as loader:
            loader.start(rank=0, world_size=1)
            batches = iter(loader)
            next(batches)
            if rank == 0:
                for worker in loader._session.engine._executor.fleet.workers.values():
                    os.kill(worker.process.pid, signal.SIGKILL)
            return outcome(lambda: [0 for _ in batches])

    def dataset_fails():
        with SwiftLoader(lambda: 1 / 0, worker_per_consumer=1, seed=1) as loader:
            try:
                loader.start(rank=0, world_size=1)
            except ZeroDivisionError as error:
                return str(error.__cause__)

    def interrupted():
        loader = make()
        loader.start(rank=0, world_size=1)
        batches = iter(loader)
        next(batches)
        found, began_s = None, time.monotonic()
        if rank == 1:  # rank 0 doesn't come
            signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            found = [outcome(lambda: next(batches)), outcome(lambda: next(batches))]
        dist.barrier()
        loader.close()
        return [found, time.monotonic() - began_s]

    def resized():
        with make({"length": 800}, worker_per_consumer="auto") as loader:
            loader.start(rank=0, world_size=1)
            batches = iter(loader)
            digests = [digest(next(batches)) for _ in range(20)]
            loader.resize(3)
            return digests + [digest(next(batches)) for _ in range(20)]

    def not_to_be_sent():
        with make(collate_fn=lambda samples: (lambda: 0) if samples[0]["index"] < 8 else len(samples), shuffle=False,
                  worker_per_consumer=0) as loader:
            loader.start(rank=0, world_size=1)
            return outcome(lambda: next(iter(loader)))

    def in_inference_mode():
        with make(collate_fn=lambda samples: torch.ones(2)) as loader, torch.inference_mode():
            loader.start(rank=0, world_size=1)
            return [batch.is_inference() for batch in loader]

    def closed_meanwhile():
        loader = make()
        loader.start(rank=0, world_size=1)
        batches = iter(loader)
        next(batches)
        found = None
        if rank == 0:
            threading.Timer(0.3, loader.close).start()
            found = outcome(lambda: next(batches))
        dist.barrier()
        loader.close()
        return found

    for scenario in (
        elsewhere,
        another_break,
        partial(stays_away, 0),
        partial(stays_away, 1),
        partial(closes, 0),
        partial(closes, 1),
        worker_dies,
        gives_up,
        dataset_fails,
        interrupted,
        closed_meanwhile,
        resized,
        not_to_be_sent,
        in_inference_mode,
    ):
        report(outcome(scenario))
        dist.barrier()
    finish()
"""


@pytest.mark.slow
@pytest.mark.timeout(200)  # fourteen troubles, one after the other
def test_ranks_that_are_not_in_step_end_with_an_error(tmp_path: Path) -> None:
    reports = run_ranks(TROUBLES, 2, tmp_path, limit_s=180)
    for rank, reported in enumerate(reports):
        elsewhere, another_break, *away, died, given_up, failed, interrupted, closed, resized, refused, inference = (
            reported
        )
        assert elsewhere[0].startswith("RankMismatch: ranks 0 and 1 share batches")
        assert "rank 0 has taken batch 4 of epoch 0 where rank 1 takes batch 1 of epoch 0" in elsewhere[0]
        assert elsewhere[1] == elsewhere[0]
        assert "rank 0 has taken batch 0 of epoch 1 where rank 1 takes batch 4 of epoch 0" in another_break
        assert away[1 - rank].startswith(f"RankStalled: rank {rank} has waited longer than timeout=1.5 s for ranks")
        assert away[rank].startswith("RankDied")
        assert away[2 + rank] is None
        assert away[3 - rank].startswith(f"RankDied: one of ranks [{1 - rank}]")
        assert died[1] == 1 - rank  # replaced on the rank that loads; the other one sees nothing
        assert given_up.startswith("WorkerDied")
        assert "ZeroDivisionError: division by zero" in failed
        assert interrupted[1] < 20
        assert len(set(resized)) == 40
        assert resized == reports[0][11]
        assert refused.startswith("EncodeError: ")
        assert inference == [False] * 12
        assert rank or closed.startswith("LoaderClosed")
    assert "ZeroDivisionError" in reports[1][9][0][0]
    assert "interrupted" in reports[1][9][0][1]
    assert reports[0][6][0] == reports[1][6][0]
    assert "rank 0, which loads for rank 1" in reports[1][8]


def test_without_a_timeout_a_rank_that_writes_a_checkpoint_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_dist: Any = dist
    limits, gloo = [], torch_dist.ProcessGroupGloo
    allgather = gloo.allgather

    def allgather_with_limit(group: Any, *arguments: Any) -> Any:
        limits.append(arguments[-1].timeout)
        return allgather(group, *arguments)

    monkeypatch.setattr(gloo, "allgather", allgather_with_limit)
    for timeout_s in (None, 5.0):
        sharing = Broadcast(torch_dist.HashStore(), [0], 0, timeout_s, None)
        for place in (START, (0, 0)):
            sharing.send(place, "batch")
        sharing.close()
    assert min(limits[:2]) > timedelta(days=365)
    assert limits[2:] == [timedelta(minutes=30), timedelta(seconds=5)]


DEATH = """
    loader = make({"pause_s": 0.001})
    loader.start(rank=0, world_size=1)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    if rank == int(os.environ["DIES"]):
        os.kill(os.getpid(), signal.SIGKILL)
    error = outcome(lambda: [0 for _ in batches])
    loader.close()
    report(error)
    os._exit(0)  # the process group has lost a rank
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_a_rank_is_an_error_on_the_other(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIES", str(rank))
    reports = run_ranks(DEATH, 2, tmp_path, killed=(rank,))
    [error] = reports[1 - rank]
    assert error.startswith(f"RankDied: one of ranks [{rank}], with which rank {1 - rank} shares batches, has ended")


FOUR_RANKS = """
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with make({"length": 200}) as loader:
        loader.start(mesh=mesh)
        digests = [digest(batch) for _ in range(2) for batch in loader]
        dist.barrier()
    report([type(loader._session.engine._executor).__name__, digests])
    finish()
"""


@pytest.mark.slow
def test_each_group_of_a_mesh_has_a_rank_that_loads(tmp_path: Path) -> None:
    reports = [reported for [reported] in run_ranks(FOUR_RANKS, 4, tmp_path)]
    names, digests = zip(*reports, strict=True)
    assert names == ("WorkerExecutor", "ReceivingExecutor", "WorkerExecutor", "ReceivingExecutor")
    assert digests[0] == digests[1] != digests[2] == digests[3]


DEVICE = """
    with make() as loader:
        loader.start(rank=0, world_size=1, device="cpu")
        found = []
        for epoch in range(3):
            for number, batch in enumerate(loader):
                found.append([float(batch["x"].double().sum()), batch["index"].tolist()])
                batch["x"] += rank
                if epoch == 1 and number == 9:
                    break
    report(found)
    finish()
"""


@pytest.mark.slow
def test_batches_ahead_of_the_loop_do_not_count_as_taken(tmp_path: Path) -> None:
    [one], [other] = run_ranks(DEVICE, 2, tmp_path)
    assert len(one) == 34
    assert one == other


PREPARED = """
    with make(shuffle=False) as loader:
        loader.prepare()
        assert len(loader) == 3  # as if each of the four ranks had data of its own
        loader.start(rank=rank // 2, world_size=2)
        report([batch["index"].tolist() for batch in loader])
    finish()
"""


@pytest.mark.slow
def test_a_dataset_that_was_prepared_before_the_ranks_were_known_gives_all_the_same_first_batch(tmp_path: Path) -> None:
    [found] = zip(*run_ranks(PREPARED, 4, tmp_path), strict=True)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert sorted(index for rank in (0, 2) for batch in found[rank] for index in batch) == list(range(96))


CHECKPOINTED = """
    from torch.distributed import checkpoint

    def make():
        return SwiftLoader(dataset=range(96), batch_size=4, worker_per_consumer=0, seed=3)

    with make() as loader:
        if not os.path.exists(f"{folder}/saved"):
            loader.start()
            loader.skip(3)
            loader.exclude([41, 57])
            iterator = iter(loader)
            first = [next(iterator).tolist() for _ in range(2)]
            checkpoint.save({"loader": loader}, checkpoint_id=f"{folder}/saved")
        else:
            checkpoint.load({"loader": loader}, checkpoint_id=f"{folder}/saved")
            iterator, first = iter(loader), []
        print(json.dumps([first, [batch.tolist() for batch in iterator], loader.state_dict()["epoch"]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(2, 1), (1, 2)])
def test_a_distributed_checkpoint_is_resumed_by_another_number_of_ranks(
    numbers: tuple[int, int], tmp_path: Path
) -> None:
    def samples(reports: list[list[Any]], part: int) -> list[int]:
        return sorted(index for ((*parts, _),) in reports for batch in parts[part] for index in batch)

    saved = run_ranks(CHECKPOINTED, numbers[0], tmp_path)
    (tmp_path / "store").unlink(missing_ok=True)
    loaded = run_ranks(CHECKPOINTED, numbers[1], tmp_path)
    assert samples(loaded, 1) == samples(saved, 1)
    assert {41, 57}.isdisjoint(samples(loaded, 1))
    assert len(samples(saved, 0) + samples(loaded, 1)) == 96 - 2 - 4 * numbers[0]
