from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from swift_loader import DataLoader, SwiftLoader
from swift_loader.options import AutoWorkers


class Slow(Dataset[torch.Tensor]):
    def __init__(self, num_samples: int = 4000, sample_s: float = 0.004) -> None:
        self.num_samples = num_samples
        self.sample_s = sample_s

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sample_s)
        return torch.tensor([index, torch.randint(1 << 30, ()).item()])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


@pytest.fixture
def quick_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that are too short for good decisions, but long enough for some."""
    monkeypatch.setattr("swift_loader.report.tuning.WINDOW_S", 0.4)
    monkeypatch.setattr("swift_loader.report.tuning.CHECK_NS", 50_000_000)


def batches_of(num_workers: Any, *, pause_s: float = 0.0) -> tuple[list[torch.Tensor], DataLoader[torch.Tensor]]:
    torch.manual_seed(3)
    loader = DataLoader(Slow(1600), batch_size=8, shuffle=True, num_workers=num_workers)
    batches = []
    for batch in loader:
        time.sleep(pause_s)
        batches.append(batch)
    return batches, loader


@pytest.mark.usefixtures("quick_tuning")
def test_the_number_grows_and_the_batches_stay_the_same() -> None:
    batches, loader = batches_of("auto", pause_s=0.004)
    assert loader.num_workers > 1
    assert any("→" in line for line in loader.report().tuning)
    assert (
        len(list(zip(range(2), loader, strict=False))) == 2
    )  # torch warns of more workers than cores, if you chose them
    expected, _ = batches_of(2)
    assert all(torch.equal(one, other) for one, other in zip(batches, expected, strict=True))


@pytest.mark.usefixtures("quick_tuning")
def test_a_number_by_hand_ends_the_tuning() -> None:
    loader = DataLoader(Slow(4000, 0.001), batch_size=8, num_workers="auto")
    for number, _ in enumerate(loader):
        if not number:
            loader.resize(2)
        time.sleep(0.002)
    assert loader.num_workers == 2
    assert type(loader.num_workers) is int
    assert loader.report().tuning == ()


def test_what_the_tuner_wants_comes_too_late_after_a_number_by_hand() -> None:
    loader = DataLoader(Slow(), batch_size=8, num_workers="auto")
    loader._resize_to(AutoWorkers(3))
    assert loader.num_workers == 3
    loader.resize(2)
    loader._resize_to(AutoWorkers(5))
    assert loader.num_workers == 2


def test_a_loader_that_a_framework_makes_again_still_chooses() -> None:
    loader = DataLoader(Slow(), batch_size=8, num_workers="auto")
    again = DataLoader(Slow(), batch_size=8, num_workers=loader.num_workers)
    for one in (again, copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert isinstance(one.num_workers, AutoWorkers)
        assert one.num_workers == 1


def test_a_resume_may_choose_another_number() -> None:
    loader = DataLoader(Slow(64, 0), batch_size=8, shuffle=True, num_workers="auto")
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = list(iterator)
    resumed = DataLoader(Slow(64, 0), batch_size=8, shuffle=True, num_workers=2)
    resumed.load_state_dict(state)
    assert all(torch.equal(one, other) for one, other in zip(rest, resumed, strict=True))


@pytest.mark.parametrize(
    ("dataset", "options", "reason"),
    [
        (Stream(), {}, "IterableDataset"),
        (Slow(), {"rng": None}, "rng=None"),
        (Slow(), {"worker_init_fn": print}, "worker_init_fn"),
    ],
)
def test_refuses_to_choose_where_batches_show_their_worker(
    dataset: Dataset[Any], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"num_workers='auto'.*{reason}"):
        DataLoader(dataset, num_workers="auto", **options)


@pytest.mark.parametrize("value", ["many", 1.5])
def test_what_is_neither_a_number_nor_auto_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=rf"num_workers={value!r}.* or 'auto'"):
        DataLoader(Slow(), num_workers=value)
    with pytest.raises(TypeError, match=rf"worker_per_consumer={value!r}.* or 'auto'"):
        SwiftLoader(Slow, worker_per_consumer=value)
