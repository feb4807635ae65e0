from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.support.helpers import exhaustive, slow
from tests.system.integrations.ranks import run_ranks


@pytest.mark.timeout(150)
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
def test_a_prepared_loader_keeps_its_class_gives_what_torch_gives_and_resumes_exactly(
    num_ranks: int, num_workers: int, case: str, tmp_path: Path
) -> None:
    launched = 0 if num_ranks == 1 else num_ranks
    arguments = str(num_workers), case
    for rank in run_ranks("dropin_accelerate.py", launched, tmp_path, *arguments, timeout_s=120, needs="accelerate"):
        whole = rank["swift"]
        assert whole["is_swift"]
        for name in ("seen", "lengths", "weights"):
            assert whole[name] == rank["torch"][name], name
        assert rank["resumed"]
        for run in rank["resumed"]:
            assert run["seen"] == whole["seen"][run["num_steps"] :], run["num_steps"]
            assert run["weights"] == whole["weights"], run["num_steps"]


def test_what_others_have_wrapped_around_accelerates_function_isnt_taken_for_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = pytest.importorskip("accelerate.accelerator")
    from swift_loader.integrations.accelerate import keep_class

    theirs = functools.wraps(len)(lambda *arguments: None)
    monkeypatch.setattr(accelerator, "prepare_data_loader", theirs)
    keep_class()
    ours = accelerator.prepare_data_loader
    keep_class()
    assert theirs is not ours is accelerator.prepare_data_loader
