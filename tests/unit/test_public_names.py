"""What users import: the public names, and nothing that takes long."""

from __future__ import annotations

import subprocess
import sys

import pytest

import swift_loader


def test_the_public_names_are_these() -> None:
    assert swift_loader.__all__ == [
        "DataLoader",
        "DatasetMismatch",
        "DevicePrefetcher",
        "EncodeError",
        "LengthBucketBatchSampler",
        "LoaderClosed",
        "NoDescriptorsLeft",
        "NoProcessesLeft",
        "ProtocolError",
        "RankDied",
        "RankMismatch",
        "RankStalled",
        "RayExecutor",
        "RemoteTraceback",
        "SampleFailure",
        "SharedMemoryFull",
        "ShuffleBatchSampler",
        "ShuffleSampler",
        "StateMismatch",
        "Stateful",
        "SwiftLoader",
        "SwiftLoaderError",
        "SwiftLoaderWarning",
        "TokenBudgetBatchSampler",
        "TooManyErrors",
        "WorkerDied",
        "WorkerError",
        "WorkerStalled",
        "batch_key",
        "default_collate",
        "distributed",
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
