from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from swift_loader.worker.usage import NOT_MEASURED, ProcessUsage, ThreadUsage

LONG_NS = 1_000_000
HAS_SCHEDSTAT = Path("/proc/self/schedstat").exists()


def burn(cpu_s: float) -> None:
    end_s = time.thread_time() + cpu_s
    while time.thread_time() < end_s:
        pass


def descriptor_of(usage: ProcessUsage) -> int | None:
    return usage._descriptor


def test_a_thread_counts_its_own_time_while_it_builds() -> None:
    usage = ThreadUsage()
    burn(0.2)
    usage.begin()
    burn(0.01)
    cpu_ns, run_delay_ns = usage.end(LONG_NS)
    assert 0.01e9 <= cpu_ns < 0.2e9
    assert run_delay_ns == NOT_MEASURED


def test_a_process_counts_from_the_end_of_the_batch_before() -> None:
    with ProcessUsage() as usage:
        burn(0.1)
        usage.begin()
        burn(0.1)
        assert usage.end(LONG_NS)[0] >= 0.2e9
        assert usage.end(LONG_NS)[0] < 0.2e9


@pytest.mark.skipif(not HAS_SCHEDSTAT, reason="the kernel doesn't tell")
def test_the_run_delay_of_long_batches_is_known_from_the_second_one_on() -> None:
    with ProcessUsage() as usage:
        delays = [usage.end(LONG_NS)[1] for _ in range(5)]
    assert delays[0] == NOT_MEASURED
    assert min(delays[1:]) >= 0


@pytest.mark.skipif(not HAS_SCHEDSTAT, reason="the kernel doesn't tell")
def test_the_run_delay_of_short_batches_is_known_for_one_of_32() -> None:
    with ProcessUsage() as usage:
        known = [number for number in range(1, 100) if usage.end(1000)[1] != NOT_MEASURED]
    assert known == [33, 65, 97]


def test_no_descriptor_is_open_before_the_first_reading_or_after_closing() -> None:
    with ProcessUsage() as usage:
        assert descriptor_of(usage) is None
        usage.end(LONG_NS)
    usage.close()
    assert descriptor_of(usage) == -1
    assert usage.end(LONG_NS)[1] == NOT_MEASURED


def test_a_descriptor_that_the_user_closed_is_not_read_again() -> None:
    with ProcessUsage() as usage:
        usage._descriptor = os.open(os.devnull, os.O_RDONLY)
        os.close(usage._descriptor)
        assert [usage.end(LONG_NS)[1] for _ in range(3)] == [NOT_MEASURED] * 3
        assert descriptor_of(usage) == -1


def test_a_system_without_the_file_measures_cpu_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, flags: int) -> int:
        raise FileNotFoundError(path)

    with ProcessUsage() as usage:
        monkeypatch.setattr(os, "open", refuse)
        measured = [usage.end(LONG_NS) for _ in range(3)]
        monkeypatch.undo()
    assert [delay for _, delay in measured] == [NOT_MEASURED] * 3
    assert all(cpu_ns >= 0 for cpu_ns, _ in measured)
