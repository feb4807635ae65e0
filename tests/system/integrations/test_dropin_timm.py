from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.integrations.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_timms_loader_gives_the_same_bits_with_the_drop_in_class(photos: Path, tmp_path: Path) -> None:
    (cases,) = run_ranks("dropin_timm.py", 0, tmp_path, "0", str(photos), timeout_s=120, needs="timm")

    assert len(cases) > 1
    for name, found in cases.items():
        batches, is_swift = found["swift"]
        assert is_swift, name
        assert batches == found["timm"], name
        assert [batch[0] for batch in found["vision"]] == [batch[0] for batch in found["timm"]], name


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_timms_loader_gives_the_same_samples_with_workers(photos: Path, tmp_path: Path) -> None:
    (cases,) = run_ranks("dropin_timm.py", 0, tmp_path, "2", str(photos), timeout_s=120, needs="timm")

    for name, found in cases.items():
        batches, is_swift = found["swift"]
        assert is_swift, name
        # Augmentation draws by sample here, and by worker in torch.
        assert [batch[:2] for batch in batches] == [batch[:2] for batch in found["timm"]], name
