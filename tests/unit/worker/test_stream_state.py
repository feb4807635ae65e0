from __future__ import annotations

from typing import Any

import pytest

from swift_loader.worker.stream_state import forget_state, has_exact_state, is_huggingface


class Stateful:
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


def rows() -> Any:
    yield from ({"number": number} for number in range(6))


def stream() -> Any:
    return pytest.importorskip("datasets").IterableDataset.from_generator(rows)


def test_a_state_needs_both_methods() -> None:
    assert has_exact_state(Stateful())
    assert not has_exact_state(iter([1]))


def test_a_dataset_of_ones_own_keeps_its_state() -> None:
    dataset = Stateful()
    assert not is_huggingface(dataset)
    forget_state(dataset)
    assert not hasattr(dataset, "loaded")


def test_a_shuffle_buffer_is_found_wherever_it_is() -> None:
    datasets = pytest.importorskip("datasets")
    plain, shuffled = stream(), stream().shuffle(seed=1, buffer_size=3)

    assert is_huggingface(plain)
    assert has_exact_state(plain)
    assert has_exact_state(datasets.interleave_datasets([plain, plain]))
    assert not has_exact_state(shuffled)
    assert not has_exact_state(shuffled.map(dict))
    assert not has_exact_state(datasets.interleave_datasets([plain, shuffled]))


def test_a_stream_that_forgets_its_state_begins_afresh() -> None:
    dataset = stream()
    for row in dataset:
        if row["number"] == 3:
            break
    dataset.load_state_dict(dataset.state_dict())
    assert next(iter(dataset))["number"] == 4

    forget_state(dataset)

    assert next(iter(dataset))["number"] == 0
