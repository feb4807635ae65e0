"""Workers that do as those of torch's DataLoader do, by means that every system has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

from swift_loader import DataLoader, EncodeError
from swift_loader.testing import portable_workers
from swift_loader.worker.seeding import Rng
from swift_loader.worker.spec import StartMethod
from tests.support.resumable import SAMPLED
from tests.support.torch_mode import begin_keys, begin_stream, rest_of, started
from tests.system.test_torch_workers import (
    Counting,
    Deadly,
    Informed,
    Keyed,
    Numbers,
    Resumable,
    batches_of,
    draws_of,
    fail,
    initialise,
    resume_after,
)


def portable(dataset: Any, **mode: Any) -> Any:
    return started(dataset, start_method=StartMethod.PORTABLE, **mode)


@pytest.mark.slow
def test_workers_know_who_they_are_and_are_seeded_as_torchs() -> None:
    with portable(Informed(), worker_init_fn=initialise) as dispatcher:
        begin_keys(dispatcher, [[number] for number in range(40)])
        seen = {batch[0] for batch in batches_of(rest_of(dispatcher))}
    assert seen <= {(number, 2, 1234 + number, True, draws_of(number, 1234)) for number in range(2)}


@pytest.mark.slow
def test_an_error_of_worker_init_fn_reaches_the_loop() -> None:
    with portable(Keyed(), worker_init_fn=fail) as dispatcher:
        begin_keys(dispatcher, [[1]])
        error = dispatcher.next_batch().error
        assert type(error) is LookupError
        assert error.args == ("no luck",)


@pytest.mark.slow
def test_keys_of_any_kind_and_number_reach_the_dataset() -> None:
    many = list(range(100_000))
    batches = [[0, 1], ["a"], [(1, "x"), None], many, many[::-1]]
    with portable(Keyed()) as dispatcher:
        begin_keys(dispatcher, batches)
        assert batches_of(rest_of(dispatcher)) == batches


@pytest.mark.slow
def test_the_keys_of_a_killed_worker_are_fetched_by_another_one(tmp_path: Path) -> None:
    (tmp_path / "5").touch()
    with portable(Deadly(tmp_path)) as dispatcher:
        begin_keys(dispatcher, [[number] for number in range(20)])
        assert batches_of(rest_of(dispatcher)) == [[number] for number in range(20)]


@pytest.mark.slow
def test_a_stream_resumes_and_its_shards_end() -> None:
    options: dict[str, Any] = {"is_stream": True, "snapshot_every": 1}
    with portable(Resumable(), **options) as dispatcher:
        begin_stream(dispatcher)
        whole = rest_of(dispatcher)
        resume = {worker_id: resume_after(whole[:4], worker_id) for worker_id in range(2)}
        begin_stream(dispatcher, resume=resume)
        assert batches_of(rest_of(dispatcher)) == batches_of(whole)[4:]


@pytest.mark.slow
def test_the_state_of_a_dataset_comes_with_its_batches() -> None:
    with portable(Counting(), num_workers=1, snapshot_every=1, rng=Rng.SAMPLE) as dispatcher:
        begin_keys(dispatcher, [[0, 1]] * 3)
        deliveries = rest_of(dispatcher)
        assert all(delivery.snapshot is not None for delivery in deliveries)


@pytest.mark.slow
@portable_workers()
def test_a_dataloader_elsewhere_gives_what_torchs_gives() -> None:
    keys: Any = torch.arange(40)
    torch.manual_seed(3)
    loader = DataLoader(keys, batch_size=4, shuffle=True, num_workers=2)
    found = [batch.tolist() for _ in range(2) for batch in loader]
    torch.manual_seed(3)
    plain: Any = torch.utils.data.DataLoader(keys, batch_size=4, shuffle=True)
    assert found == [batch.tolist() for _ in range(2) for batch in plain]
    stream = DataLoader(Numbers(), batch_size=3, num_workers=2)
    expected = torch.utils.data.DataLoader(Numbers(), batch_size=3, num_workers=2, multiprocessing_context="fork")
    assert [batch.tolist() for batch in stream] == [batch.tolist() for batch in expected]


@pytest.mark.slow
@portable_workers()
def test_a_loader_with_portable_workers_resumes_with_another_number_of_them() -> None:
    make = SAMPLED["shuffle"]
    torch.manual_seed(1)
    whole = [[batch.tolist() for batch in SAMPLED["shuffle"](0)]]
    torch.manual_seed(1)
    loader = make(2)
    iterator = iter(loader)
    assert "PortableExecutor" in repr(loader._latest.workers)
    found = [next(iterator).tolist() for _ in range(5)]
    state = loader.state_dict()
    del iterator, loader
    loader = make(1)
    loader.load_state_dict(state)
    assert [found + [batch.tolist() for batch in loader]] == whole


@pytest.mark.slow
@portable_workers()
def test_a_dataset_that_can_not_be_sent_is_an_error_elsewhere() -> None:
    dataset: Any = [(number for number in range(3))]
    with pytest.raises(EncodeError, match="generator"):
        next(iter(DataLoader(dataset, num_workers=1)))
