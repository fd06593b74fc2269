"""Amounts keep three digits, also where they round up into the next unit."""

import pytest

from jdp.core.formatting import duration, rate, share, size


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (size(0), "0 B"),
        (size(1000), "1000 B"),
        (size(1536), "1.5 KiB"),
        (size(999.6 * 2**20), "1000 MiB"),
        (size(1023.9 * 2**20), "1 GiB"),
        (size(31.2 * 2**30), "31.2 GiB"),
        (duration(40e-6), "40 µs"),
        (duration(0.0873), "87.3 ms"),
        (duration(0.9997), "1 s"),
        (duration(1234.5), "1234 s"),
        (rate(12345), "12.3k"),
        (rate(999_600), "1M"),
        (rate(2e12), "2T"),
        (share(0), "0 %"),
        (share(0.004), "0.4 %"),
        (share(0.87), "87 %"),
        (share(0.9951), "99.5 %"),
        (share(1), "100 %"),
    ],
)
def test_as_people_read_them(said, wanted):
    assert said == wanted
