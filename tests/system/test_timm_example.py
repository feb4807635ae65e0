from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.test_examples import TIMEOUT_S, run_examples

pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)

TINY = "--epochs 1 --batch-size 128"
"""11 steps."""


@pytest.mark.slow
def test_a_run_that_is_stopped_and_resumed_trains_the_model_of_an_uninterrupted_one(
    tmp_path: Path, photos: Path
) -> None:
    for part in ("train", "val"):
        (tmp_path / part).symlink_to(photos)

    results = run_examples(
        tmp_path,
        f"timm_example.py {TINY} --workers 0",
        f"timm_example.py {TINY} --workers 1 --save-every 4 --stop-after 6 --save {tmp_path}/saved",
        f"timm_example.py {TINY} --workers 0 --resume {tmp_path}/saved/epoch-0-sample-512",
        f"timm_example.py --epochs 1 --batch-size 4 --workers 0 --root {tmp_path}",
        needs=("timm", "torchvision", "PIL"),
    )

    assert len(results) == 3
    assert results[0] == results[1]
    assert "of 359 digits" in results[0]
    assert "of 14 photos" in results[2]
