from __future__ import annotations

from typing import Any

import pytest

from swift_loader.vision.sizes import SizeChoices, refuse_choices

GIVEN: dict[str, Any] = {
    "input_size": (3, 32, 32),
    "batch_size": 4,
    "mean": (0.5, 0.5, 0.5),
    "input_size_choices": [24, 32],
    "batch_size_choices": None,
    "batch_choice_weights": None,
    "batch_choice_seed": 0,
    "batch_choice_schedule": "constant",
    "batch_schedule_epochs": None,
    "batch_schedule_spread": 0.65,
    "batch_schedule_random_mix": 0.1,
    "num_batches": None,
}


def choices_of(**options: Any) -> SizeChoices:
    return SizeChoices.of({**GIVEN, **options})


def test_sizes_are_sides_pairs_or_complete() -> None:
    choices = choices_of(input_size_choices=[24, (16, 32), [3, 8, 8]])
    assert choices.image_sizes == ((3, 24, 24), (3, 16, 32), (3, 8, 8))
    assert choices.batch_sizes == (4, 4, 4)


def test_each_size_may_have_a_batch_size_of_its_own() -> None:
    assert choices_of(batch_size_choices=[8, 4]).batch_sizes == (8, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_size_choices": []}, r"input_size_choices=\[\] has no sizes"),
        ({"input_size_choices": [(1, 8, 8)]}, r"has the size \(1, 8, 8\); each must be .* C=3"),
        ({"batch_size_choices": [2]}, r"batch_size_choices=\[2\] has 1 values, but input_size_choices has 2"),
        ({"batch_choice_weights": [1, -1]}, r"batch_choice_weights=\[1, -1\] aren't weights; none may be negative"),
        ({"batch_choice_weights": [1, float("nan")]}, "aren't weights"),
        ({"batch_choice_seed": -1}, "batch_choice_seed=-1 is too small"),
        (
            {"batch_choice_schedule": "random"},
            "batch_choice_schedule='random' is unknown; it must be one of 'constant'",
        ),
        ({"batch_choice_schedule": "progressive"}, "needs batch_schedule_epochs"),
        (
            {"batch_choice_schedule": "progressive", "batch_schedule_epochs": 3, "batch_schedule_spread": -1},
            "batch_schedule_spread=-1 isn't a deviation; it must be at least 0",
        ),
        (
            {"batch_choice_schedule": "progressive", "batch_schedule_epochs": 3, "batch_schedule_random_mix": 2},
            "batch_schedule_random_mix=2 isn't a fraction; it must be from 0 to 1",
        ),
    ],
)
def test_a_value_out_of_its_range_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choices_of(**options)


@pytest.mark.parametrize("name", ["batch_size_choices", "batch_choice_weights"])
def test_values_for_sizes_need_the_sizes(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}=\[2\] needs input_size_choices"):
        refuse_choices({**GIVEN, name: [2]})
    refuse_choices(GIVEN)
