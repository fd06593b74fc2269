"""A batch on a target's devices: rows that do not divide are rounded up once, with one message."""

import pytest

from jdp.foresight.targets.relocate import round_up_rows


@pytest.mark.parametrize(
    ("rows", "shards", "accumulate", "expected"),
    [(16, 8, 2, 16), (9, 8, 1, 16), (17, 8, 2, 32), (1, 1, 1, 1), (0, 8, 1, 0)],
)
def test_rows_are_rounded_up_to_what_divides(rows, shards, accumulate, expected):
    found, notes = round_up_rows(rows, shards, accumulate)
    assert found == expected
    assert len(notes) == (found != rows)


def test_what_was_rounded_is_in_the_note():
    (note,) = round_up_rows(9, 4, 3)[1]
    assert note == "a batch must divide by 4 shards × accumulate=3 = 12; given 9 rows: 12 are taken"


def test_more_rows_than_a_batch_can_have():
    with pytest.raises(ValueError, match=r"= 7200000000; given 16 rows: .* fewer than 2\^31 rows: lower accumulate"):
        round_up_rows(16, 8, 900_000_000)
