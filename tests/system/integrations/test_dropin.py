"""Programs of frameworks whose DataLoader is torch's or ours see the same, and resume with ours."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import exhaustive, run_script, slow
from tests.system.integrations.dropin import NUM_STEPS
from tests.system.integrations.ranks import FOLDER, run_ranks

pytestmark = pytest.mark.timeout(170)

IMPORT = "from torch.utils.data import DataLoader, TensorDataset"
CHANGED = "from torch.utils.data import TensorDataset\nfrom swift_loader import DataLoader"


def study(script: str, num_ranks: int, folder: Path, *arguments: object, needs: str, timeout_s: float = 120) -> Any:
    """Return the reports of a script's ranks, in each of which torch's class and ours must have given the same."""
    launched = 0 if num_ranks == 1 else num_ranks
    ranks = run_ranks(script, launched, folder, *map(str, arguments), timeout_s=timeout_s, needs=needs)
    for rank in ranks:
        is_swift = rank["swift"].pop("is_swift")
        assert is_swift in (True, [True, True]), "the framework made other loaders of them"
        assert {name: rank["torch"][name] for name in rank["swift"]} == rank["swift"]
        assert rank["resumed"]
    return ranks


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_plain_script_prints_the_same_with_one_import_changed(num_workers: int, tmp_path: Path) -> None:
    code = (FOLDER / "dropin_plain.py").read_text()
    assert IMPORT in code
    with_torch = run_script(code, str(num_workers), folder=tmp_path)
    assert run_script(code.replace(IMPORT, CHANGED), str(num_workers), folder=tmp_path) == with_torch


@pytest.mark.parametrize(
    ("num_ranks", "num_workers", "case"),
    [
        slow(1, 0, "sampler"),
        exhaustive(1, 2, "seedable sampler"),
        exhaustive(2, 0, "sampler"),
        exhaustive(2, 0, "seedable sampler"),
        exhaustive(2, 0, "split batches"),
        exhaustive(2, 0, "stream"),
        exhaustive(2, 0, "stream, each rank its own"),
        slow(2, 2, "sampler"),
    ],
)
def test_accelerate_keeps_the_class_and_resumes_exactly(
    num_ranks: int, num_workers: int, case: str, tmp_path: Path
) -> None:
    for rank in study("dropin_accelerate.py", num_ranks, tmp_path, num_workers, case, needs="accelerate"):
        for run in rank["resumed"]:
            assert run["seen"] == rank["swift"]["seen"][run["num_steps"] :], run["num_steps"]
            assert run["weights"] == rank["swift"]["weights"], run["num_steps"]


def test_what_others_have_wrapped_around_accelerates_function_isnt_taken_for_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = pytest.importorskip("accelerate.accelerator")
    from swift_loader import DataLoader
    from swift_loader.integrations.accelerate import keep_class

    theirs = functools.wraps(len)(lambda *arguments: None)
    monkeypatch.setattr(accelerator, "prepare_data_loader", theirs)
    keep_class(DataLoader)
    ours = accelerator.prepare_data_loader
    keep_class(DataLoader)
    assert theirs is not ours is accelerator.prepare_data_loader


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "num_workers"), [exhaustive(1, 0), exhaustive(2, 0), (2, 2)])
def test_fabric_resumes_the_epoch_exactly(num_ranks: int, num_workers: int, tmp_path: Path) -> None:
    for rank in study("dropin_fabric.py", num_ranks, tmp_path, num_workers, needs="lightning"):
        for run in rank["resumed"]:
            rest = rank["swift"]["seen"][run["num_steps"] :]
            # Fabric counts the epochs of a DistributedSampler from 0 after a restart, so later ones differ.
            num_same = len(rest) if num_ranks == 1 else -run["num_steps"] % NUM_STEPS
            assert run["seen"][:num_same] == rest[:num_same], run["num_steps"]
            assert len(run["seen"]) == len(rest)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "arguments"),
    [
        exhaustive(1, (0, "map", 7, 10)),
        (2, (0, "map", 7, 10)),
        exhaustive(1, (0, "stream", 1, 7, 14)),
        exhaustive(1, (2, "stream", 9)),
    ],
)
def test_a_trainer_of_hugging_face_resumes_exactly(num_ranks: int, arguments: Any, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    for rank in study("dropin_huggingface.py", num_ranks, tmp_path, *arguments, needs="transformers", timeout_s=140):
        whole = rank["swift"]["seen"]
        for run in rank["resumed"]:
            # Later epochs of a stream have another order: the Trainer counts them from 0 after a restart if it doesn't
            # know the length.
            num_left = len(whole) - run["num_steps"]
            num_same = num_left if arguments[1] == "map" else NUM_STEPS - run["num_steps"] % NUM_STEPS
            assert run["seen"][:num_same] == whole[run["num_steps"] :][:num_same], run["num_steps"]
            assert len(run["seen"]) == num_left
            assert arguments[1] == "stream" or run["weights"] == rank["swift"]["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_timms_loader_gives_the_same_with_the_drop_in_class(num_workers: int, photos: Path, tmp_path: Path) -> None:
    arguments = str(num_workers), str(photos)
    (cases,) = run_ranks("dropin_timm.py", 0, tmp_path, *arguments, timeout_s=120, needs="timm")
    assert len(cases) > 1 or num_workers
    for name, found in cases.items():
        batches, is_swift = found["swift"]
        assert is_swift, name
        # With workers, augmentation draws by sample here, and by worker in torch.
        parts = slice(0, 2 if num_workers else 3)
        assert [batch[parts] for batch in batches] == [batch[parts] for batch in found["timm"]], name
        assert num_workers or [batch[0] for batch in found["vision"]] == [batch[0] for batch in found["timm"]], name
