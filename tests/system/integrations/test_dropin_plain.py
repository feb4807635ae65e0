from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.helpers import run_script
from tests.system.integrations.ranks import FOLDER

IMPORT = "from torch.utils.data import DataLoader, TensorDataset"
CHANGED = "from torch.utils.data import TensorDataset\nfrom swift_loader import DataLoader"


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_plain_script_prints_the_same_with_one_import_changed(num_workers: int, tmp_path: Path) -> None:
    code = (FOLDER / "dropin_plain.py").read_text()
    assert IMPORT in code

    with_torch = run_script(code, str(num_workers), folder=tmp_path)
    with_swift = run_script(code.replace(IMPORT, CHANGED), str(num_workers), folder=tmp_path)

    assert with_swift == with_torch
