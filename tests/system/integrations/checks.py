"""What must hold of a run that was resumed."""

from __future__ import annotations

from typing import Any

from tests.system.integrations.training import NUM_EPOCHS, NUM_SAMPLES, NUM_STEPS, SAVED_AFTER


def assert_complete(runs: list[Any], *, draws: bool = True) -> None:
    """Fail unless the ranks had all samples in each epoch, the same number of batches, and drew anew each time.

    Args:
        runs: By rank, what was seen, batch by batch.
        draws: Whether the samples draw.
    """
    num_samples = NUM_SAMPLES[len(runs)]
    assert [len(run) for run in runs] == [NUM_EPOCHS * NUM_STEPS] * len(runs)
    for epoch in range(NUM_EPOCHS):
        steps = slice(epoch * NUM_STEPS, (epoch + 1) * NUM_STEPS)
        assert {index for run in runs for indices, _ in run[steps] for index in indices} == set(range(num_samples))
    drawn = {value for run in runs for _, samples in run for value, *_ in samples}
    assert not draws or len(drawn) == NUM_EPOCHS * num_samples, (
        "padding repeats a sample; nothing else may be drawn twice"
    )


def assert_resumed_exactly(ranks: list[Any]) -> None:
    """Fail unless each rank saw the same samples and ended with the same weights wherever it was resumed.

    Args:
        ranks: By rank, the runs by name, each with `seen` and `weights`.
    """
    assert_complete([rank["uninterrupted"]["seen"] for rank in ranks])
    for rank in ranks:
        whole = rank["uninterrupted"]
        for place, num_steps in SAVED_AFTER.items():
            assert rank[place]["seen"] == whole["seen"][num_steps:], place
            assert rank[place]["weights"] == whole["weights"], place
