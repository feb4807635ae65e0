"""Checks a file against Chrome's trace event format, as its viewers read it."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]

_PHASES = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "C": {"name", "pid", "ts", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "t": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id"},
    "M": {"name", "pid", "args"},
}
_METADATA = {
    "process_name": {"name"},
    "process_sort_index": {"sort_index"},
    "thread_name": {"name"},
    "thread_sort_index": {"sort_index"},
}
_ROUNDING_US = 0.002
"""A time of `2**42` µs is a float with steps of 1 ns."""


def read_trace(path: Path) -> dict[str, Any]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    trace: dict[str, Any] = json.loads(text)
    return trace


def check_format(events: list[Event]) -> None:
    """Fail unless each event has what its phase needs, spans are nested in each row, and arrows are whole."""
    for event in events:
        assert _PHASES[event["ph"]] <= event.keys(), event
        assert isinstance(event["pid"], int)
        assert isinstance(event.get("tid", 0), int)
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        if event["ph"] == "M":
            assert event["args"].keys() == _METADATA[event["name"]]
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    for row in rows.values():
        _check_nesting(row)
    _check_arrows(events, rows)


def _check_nesting(row: list[Event]) -> None:
    open_ends: list[float] = []
    for span in sorted(row, key=lambda span: (span["ts"], -span["dur"])):
        while open_ends and open_ends[-1] <= span["ts"] + _ROUNDING_US:
            open_ends.pop()
        end = span["ts"] + span["dur"]
        assert not open_ends or end <= open_ends[-1] + _ROUNDING_US, f"{span} overlaps with the span that it begins in"
        open_ends.append(end)


def _check_arrows(events: list[Event], rows: dict[tuple[int, int], list[Event]]) -> None:
    """Fail unless each arrow has one begin and one end, in the order of time, and each point lies in a span."""
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            arrows[event["cat"], event["name"], event["id"]].append(event)
            around = [
                span
                for span in rows[event["pid"], event["tid"]]
                if span["ts"] - _ROUNDING_US <= event["ts"] <= span["ts"] + span["dur"] + _ROUNDING_US
            ]
            assert around, f"{event} is in no span"
    for points in arrows.values():
        assert "".join(point["ph"] for point in sorted(points, key=lambda point: point["ts"])) in ("sf", "stf"), points


def spans(events: list[Event], name: str) -> list[Event]:
    """Return the spans of a name, in the order of time."""
    return sorted((event for event in events if event["ph"] == "X" and event["name"] == name), key=lambda e: e["ts"])


def named(events: list[Event]) -> dict[str, int]:
    """Return the rows of the trace: name to thread id."""
    return {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
