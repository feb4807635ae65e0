"""What users import: the public names, and nothing that takes long."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest

import swift_loader
from swift_loader.options import WorkerType
from swift_loader.pipeline import Pipeline, StageLoader
from swift_loader.pipeline.maps import OutputOrder, Where
from swift_loader.samplers.lengths import Fit, Oversized
from swift_loader.sampling.plan import Uneven
from swift_loader.worker.fetch import OnError
from swift_loader.worker.seeding import Rng
from swift_loader.worker.spec import StartMethod

WORDS: dict[str, type[Enum]] = {
    "fit": Fit,
    "on": Where,
    "on_error": OnError,
    "output_order": OutputOrder,
    "oversized": Oversized,
    "rng": Rng,
    "start_method": StartMethod,
    "uneven": Uneven,
    "worker_type": WorkerType,
}


def test_the_public_names_are_these() -> None:
    assert swift_loader.__all__ == [
        "BatchMemory",
        "CacheCorrupt",
        "CacheMismatch",
        "DataLoader",
        "DatasetMismatch",
        "DevicePrefetcher",
        "EncodeError",
        "LengthBucketBatchSampler",
        "LoaderClosed",
        "Mixture",
        "NoDescriptorsLeft",
        "NoProcessesLeft",
        "PackCollate",
        "PackedDataset",
        "ProtocolError",
        "RankDied",
        "RankMismatch",
        "RankStalled",
        "RayExecutor",
        "RemoteTraceback",
        "SampleFailure",
        "SamplesDraw",
        "SharedList",
        "SharedMemoryFull",
        "SharedMemoryLost",
        "ShuffleBatchSampler",
        "ShuffleSampler",
        "StateMismatch",
        "Stateful",
        "StratifiedBatchSampler",
        "SwiftLoader",
        "SwiftLoaderError",
        "SwiftLoaderWarning",
        "TokenBudgetBatchSampler",
        "TooManyErrors",
        "WeightedBatchSampler",
        "WorkerDied",
        "WorkerError",
        "WorkerStalled",
        "batch_key",
        "cached",
        "default_collate",
        "distributed",
        "mapped",
        "sample_rng",
        "to_device",
    ]
    assert dir(swift_loader) == swift_loader.__all__
    assert all(getattr(swift_loader, name).__name__ == name for name in swift_loader.__all__)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Loader'"):
        swift_loader.Loader  # noqa: B018 - looking it up is the test


def test_the_package_and_what_a_worker_runs_import_torch_only_where_it_is_used() -> None:
    """It takes a second, which workers whose dataset needs no torch save."""
    program = (
        "import sys, swift_loader, swift_loader.worker.loop, swift_loader.worker.template, swift_loader.batch.collate\n"
        "import swift_loader.transport.codec, swift_loader.transport.by_value\n"
        "print(*{'torch', 'dill', 'cloudpickle'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (swift_loader.SwiftLoader.__init__, "on_error rng start_method uneven worker_type"),
        (swift_loader.DataLoader.__init__, "rng worker_type"),
        (swift_loader.LengthBucketBatchSampler.__init__, "uneven"),
        (swift_loader.TokenBudgetBatchSampler.__init__, "fit oversized uneven"),
        (swift_loader.ShuffleSampler.__init__, "uneven"),
        (swift_loader.StratifiedBatchSampler.__init__, "uneven"),
        (swift_loader.WeightedBatchSampler.__init__, "uneven"),
        (Pipeline.map, "on output_order"),
        (Pipeline.merge, "output_order"),
        (StageLoader.__init__, "output_order"),
    ],
)
def test_annotations_have_the_words_that_an_option_takes(function: Callable[..., Any], options: str) -> None:
    for option in options.split():
        written = re.findall(r"'(\w+)'", function.__annotations__[option])
        assert written == [word.value for word in WORDS[option] if word is not Rng.NONE]  # that is None
