from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from swift_loader import DataLoader, SwiftLoader, SwiftLoaderWarning
from tests.system.integrations.ranks import run_ranks
from tests.system.integrations.training import NUM_EPOCHS, NUM_STEPS, assert_complete

NUM_CASES = 8


def check(ranks: list[Any], name: str, num_resumed: int | None = None) -> None:
    """Fail unless the fit of a case is the one of its reference, and exact wherever it was resumed."""
    if "Loader" in name and "Stage" not in name:
        assert_complete([rank[name]["uninterrupted"]["seen"] for rank in ranks], draws="Swift" in name)
    for rank in ranks:
        case = rank[name]
        whole, resumed = case["uninterrupted"], case["resumed"]
        assert whole["is_ours"], "the Trainer made other loaders of them"
        assert {part: whole[part] for part in ("seen", "validated", "weights")} == {
            part: case["reference"][part] for part in ("seen", "validated", "weights")
        }
        assert len(resumed) == (NUM_EPOCHS * (NUM_STEPS + 1) if num_resumed is None else num_resumed)
        for run in resumed:
            # The Trainer doesn't load a DataLoader's state from a checkpoint of an epoch's end; the callback does.
            if len(ranks) == 2 or name != "DataLoader" or not run["place"].startswith("end"):
                assert run["seen"] == whole["seen"][run["num_steps"] :], (name, run["place"])
                assert run["weights"] == whole["weights"], (name, run["place"])
        assert case["threads"] == [], name


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("num_ranks", "name", "resumes", "num_resumed"),
    [
        (1, "SwiftLoader, OneCycleLR", str(NUM_STEPS + 2), 1),
        (1, "DataLoader", "all", None),
        (1, "DataLoader, OneCycleLR", "all", None),
        (2, "DataLoader, workers", str(2 * NUM_STEPS), 2),
    ],
)
def test_a_fit_is_the_one_of_a_plain_loader_and_resumes_exactly(
    num_ranks: int, name: str, resumes: str, num_resumed: int | None, tmp_path: Path
) -> None:
    launched = 0 if num_ranks == 1 else num_ranks
    ranks = run_ranks("lightning_script.py", launched, tmp_path, name, resumes, timeout_s=150, needs="lightning")

    check(ranks, name, num_resumed)


@pytest.mark.exhaustive
@pytest.mark.timeout(500)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_fit_resumes_exactly_from_every_checkpoint(num_ranks: int, tmp_path: Path) -> None:
    launched = 0 if num_ranks == 1 else num_ranks
    ranks = run_ranks("lightning_script.py", launched, tmp_path, timeout_s=450, needs="lightning")

    assert {len(cases) for cases in ranks} == {NUM_CASES}
    for name in ranks[0]:
        check(ranks, name)


ROWS: Any = list(torch.arange(80.0).view(20, 4))
LIMITED: Any = {"limit_train_batches": 3}
OVERFIT: Any = {"overfit_batches": 3}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "limit"),
    [
        (partial(DataLoader, ROWS, 5, shuffle=True, seed=3), LIMITED),
        (partial(DataLoader, ROWS, 5, shuffle=True, seed=3), OVERFIT),
        (partial(SwiftLoader, dataset=ROWS, batch_size=5, worker_per_consumer=0, seed=3), LIMITED),
        (partial(SwiftLoader, dataset=ROWS, batch_size=5, worker_per_consumer=0, shuffle=False), OVERFIT),
    ],
)
def test_a_fit_goes_on_behind_a_limited_epoch(make: Any, limit: Any, tmp_path: Path) -> None:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    from tests.system.integrations.lightning_fit import fit

    save = partial(callbacks.ModelCheckpoint, tmp_path, "{step}", save_top_k=-1, every_n_train_steps=3)
    whole = fit(make(), save(), tmp_path, **limit).seen
    resumed = fit(make(), save(), tmp_path, tmp_path / "step=3.ckpt", **limit).seen
    assert (len(whole), resumed) == (6, whole[3:])
    with pytest.raises(ValueError, match=r"give SwiftLoader\(shuffle=False\)"):
        fit(SwiftLoader(dataset=ROWS), save(), tmp_path, **OVERFIT)


DATA: Any = partial(DataLoader, ROWS, 3, shuffle=True)
SWIFT: Any = partial(SwiftLoader, dataset=ROWS, worker_per_consumer=0, seed=3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("num_steps", "in_validation"), [(0, False), (5, False), (6, False), (7, False), (7, True)])
@pytest.mark.parametrize(
    "make",
    [
        partial(DATA, seed=3),
        partial(DATA, num_workers=1, seed=3),
        lambda: DATA(generator=torch.Generator().manual_seed(3)),
        partial(SWIFT, batch_size=3),
    ],
)
def test_a_checkpoint_of_an_exception_has_the_batch_of_the_step_that_failed(
    make: Any, num_steps: int, in_validation: bool, tmp_path: Path
) -> None:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    from swift_loader.integrations.lightning import LoaderStateCallback
    from tests.system.integrations.lightning_fit import Failing, Kept, fit

    def run(*more: Any, **options: Any) -> Kept:
        loader = make()
        own = loader if isinstance(loader, SwiftLoader) else None
        saves: Any = callbacks.OnExceptionCheckpoint(tmp_path)
        if num_steps == 5:
            saves = callbacks.ModelCheckpoint(tmp_path, "on_exception", every_n_epochs=9, save_on_exception=True)
        return fit(loader, [LoaderStateCallback(own), saves, *more], tmp_path, **options)

    whole = run().seen
    with pytest.raises(FloatingPointError):
        run(Failing(num_steps, in_validation=in_validation))
    assert run(checkpoint=tmp_path / "on_exception.ckpt").seen == whole[num_steps:]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("has_callback", [False, True])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"batch_size": 3}, {"batch_size": 8}),
        ({"batch_size": 8}, {"batch_size": 3}),
        ({"batch_size": 3, "nb_consumer": 2}, {"batch_size": 3}),
    ],
)
def test_a_fit_resumes_with_another_batch_size_or_number_of_ranks(
    before: Any, after: Any, has_callback: bool, tmp_path: Path
) -> None:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    from swift_loader.integrations.lightning import LoaderStateCallback
    from tests.system.integrations.lightning_fit import Kept, fit

    def run(options: Any, checkpoint: Path | None = None) -> Kept:
        save = callbacks.ModelCheckpoint(
            tmp_path / str(checkpoint is None), "{step}", save_top_k=-1, every_n_train_steps=1
        )
        with SWIFT(**options) as loader:
            loader.start(0)
            return fit(loader, [save, LoaderStateCallback(loader)] if has_callback else save, tmp_path, checkpoint)

    run(before)
    num_samples = before["batch_size"] * before.get("nb_consumer", 1)
    num_steps = -(-len(ROWS) // num_samples)
    for step in range(1, 2 * num_steps):
        epoch, done = divmod(step, num_steps)
        left = [row[0] for batch in run(after, tmp_path / "True" / f"{step=}.ckpt").seen for row in batch]
        num_left = max(0, len(ROWS) - done * num_samples)
        assert [len(set(left[:num_left])), len(set(left[num_left:])), len(left)] == [
            num_left,
            (1 - epoch) * len(ROWS),
            num_left + (1 - epoch) * len(ROWS),
        ], step


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_epoch_after_one_with_skipped_steps_is_whole(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from tests.system.integrations.lightning_fit import fit

    loader = SWIFT(batch_size=3)
    loader.skip([1, 2])
    assert [len(batch) for batch in fit(loader, [], tmp_path).seen] == [3] * 4 + [2] + [3] * 6 + [2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [partial(DATA, seed=3), partial(SWIFT, batch_size=3)])
def test_a_checkpoint_without_the_callback_resumes_with_it(make: Any, tmp_path: Path) -> None:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    from swift_loader.integrations.lightning import LoaderStateCallback
    from tests.system.integrations.lightning_fit import AsksForSteps, fit

    save = partial(callbacks.ModelCheckpoint, tmp_path, "{step}", save_top_k=-1, every_n_train_steps=4)
    whole, loader = fit(make(), save(), tmp_path).seen, make()
    own = loader if isinstance(loader, SwiftLoader) else None
    resumed = fit(loader, [LoaderStateCallback(own), AsksForSteps()], tmp_path, tmp_path / "step=4.ckpt")
    assert resumed.seen == whole[4:]
    fit(TorchDataLoader(ROWS, 3), save(), tmp_path)
    with pytest.warns(SwiftLoaderWarning, match="a checkpoint of an epoch's end"):
        fit(DATA(), LoaderStateCallback(), tmp_path, tmp_path / "step=4-v1.ckpt")
