from __future__ import annotations

from typing import Any

import pytest

from swift_loader.worker.stream_state import has_exact_state, is_huggingface


def rows() -> Any:
    yield from ({"number": number} for number in range(6))


def stream() -> Any:
    return pytest.importorskip("datasets").IterableDataset.from_generator(rows)


def test_a_shuffle_buffer_is_found_wherever_it_is() -> None:
    datasets = pytest.importorskip("datasets")
    plain, shuffled = stream(), stream().shuffle(seed=1, buffer_size=3)

    assert is_huggingface(plain)
    assert has_exact_state(plain)
    assert has_exact_state(datasets.interleave_datasets([plain, plain]))
    assert not has_exact_state(shuffled)
    assert not has_exact_state(shuffled.map(dict))
    assert not has_exact_state(datasets.interleave_datasets([plain, shuffled]))
