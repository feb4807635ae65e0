"""Numbers as text."""

from __future__ import annotations

import pytest

from swift_loader.doctor.units import count_text, nbytes_text, share_text, time_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (time_text(0.0), "0.00 us"),
        (time_text(1.234e-5), "12.3 us"),
        (time_text(0.0123), "12.3 ms"),
        (time_text(0.9999), "1,000 ms"),
        (time_text(83.2), "83.2 s"),
        (nbytes_text(12.4), "12 B"),
        (nbytes_text(1536), "1.50 KiB"),
        (nbytes_text(80 << 20), "80.0 MiB"),
        (nbytes_text(1 << 60), "1,048,576 TiB"),
        (share_text(0.254), "25 %"),
        (count_text(1, "worker"), "1 worker"),
        (count_text(1000, "sample"), "1,000 samples"),
    ],
)
def test_numbers_have_a_unit_and_about_three_digits(text: str, expected: str) -> None:
    assert text == expected
