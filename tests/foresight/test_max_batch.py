"""The largest batch that fits is found in few compilations, whatever memory's curve, and is the largest."""

import pytest

from jdp.foresight.candidates.max_batch import max_batch

CURVES = {
    "a line": lambda rows: 1000 + 7 * rows,
    "a line with steps": lambda rows: 1000 + 40 * (rows // 5),
    "steep": lambda rows: 100 + 900 * rows,
    "bent": lambda rows: 500 + 3 * rows + rows**2 // 50,
    "flat, then steep": lambda rows: 900 + max(0, rows - 30) * 50,
}


@pytest.mark.parametrize("start", [1, 8, 200])
@pytest.mark.parametrize("curve", CURVES, ids=str)
def test_it_is_the_largest(curve, start):
    needs, available = CURVES[curve], 2000
    found = max_batch(needs, available, per_row=16, start=start)
    largest = max(rows for rows in range(1, 1000) if needs(rows) <= available)
    assert needs(found.rows) <= available < needs(found.too_many)
    assert largest - found.rows <= largest // 64
    assert (found.batch_size, found.needed) == (16 * found.rows, needs(found.rows))
    assert found.compilations <= 13


def test_a_line_takes_four_compilations():
    assert max_batch(CURVES["a line"], 2000, per_row=1, start=8).compilations <= 4


def test_nothing_fits():
    found = max_batch(lambda rows: 5000 + rows, 2000, per_row=8, start=64)
    assert (found.rows, found.batch_size, found.too_many) == (0, 0, 1)
    assert "Not even one row" in str(found)
