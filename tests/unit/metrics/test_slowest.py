from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.metrics.observations import NUM_SLOWEST, Slowest

notes = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 10**6), st.integers(0, 3)), max_size=200)


@given(noted=notes)
@settings(max_examples=200, deadline=None)
def test_the_slowest_samples_are_kept_each_with_its_longest_time(noted: list[tuple[int, int, int]]) -> None:
    slowest = Slowest()
    longest: dict[int, int] = {}
    for index, took_ns, epoch in noted:
        if took_ns > slowest.floor_ns:  # as the caller does
            slowest.note(index, took_ns, epoch)
        longest[index] = max(took_ns, longest.get(index, 0))
    kept = slowest.samples()
    assert [sample.seconds for sample in kept] == sorted((ns / 1e9 for ns in longest.values()), reverse=True)[
        :NUM_SLOWEST
    ]
    assert len({sample.index for sample in kept}) == len(kept)
    assert all(sample.seconds == longest[sample.index] / 1e9 for sample in kept)


def test_a_sample_is_kept_with_the_epoch_of_its_longest_time() -> None:
    slowest = Slowest()
    for epoch, took_ns in enumerate([5, 9, 7]):
        slowest.note(3, took_ns, epoch)
    assert [(sample.index, sample.epoch) for sample in slowest.samples()] == [(3, 1)]
