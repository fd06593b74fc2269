"""Twenty random signals to a run: every row is that of the calm run, once, and nothing is left behind."""

import pytest
import storm

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def test_a_run_comes_through_a_storm_bit_for_bit(tmp_path):
    seen = storm.run(tmp_path, 20, seed=20261125)
    assert seen["orphans"] == 0
    assert seen["repeated"][2] <= 2 * storm.EVERY, "the copy that was being written, and the one before it"
