"""Amounts keep three digits, also when they round up into the next unit; messages shorten values."""

import pytest

from jdp.base.formatting import format_bytes, format_percent, format_rate, format_seconds
from jdp.base.toml import brief


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (format_bytes(1536), "1.5 KiB"),
        (format_bytes(999.6 * 2**20), "1000 MiB"),
        (format_bytes(1023.9 * 2**20), "1 GiB"),
        (format_seconds(40e-6), "40 µs"),
        (format_seconds(0.9997), "1 s"),
        (format_rate(12345), "12.3k"),
        (format_rate(999_600), "1M"),
        (format_rate(2e12), "2T"),
        (format_percent(0.004), "0.4 %"),
        (format_percent(0.9951), "99.5 %"),
        (format_percent(1), "100 %"),
        (brief([*range(12)]), "[0, 1, 2, … and 9 more]"),
        (brief({"a": ["x" * 101]}), f'{{a = ["{"x" * 60}" … (101 characters)]}}'),
    ],
)
def test_as_people_read_them(text, wanted):
    assert text == wanted
