"""Which steps are bad, when a run goes back and what it leaves out: a function of the losses alone."""

import json
import math

import numpy as np
import pytest

from jdp.guard.bad_steps import NEW_LEVEL, BadSteps, Level, RollBack, Rules

NOISE = np.random.default_rng(0).normal(2.0, 0.1, 400).tolist()


def judged(rules, losses, bad=None, start=0):
    """The bad steps, and the roll-back if there was one. A NaN is a skipped step."""
    bad, why = bad or BadSteps(), {}
    for step, loss in enumerate(losses, start=start + 1):
        try:
            if said := rules.judge(bad, step, loss, skipped=math.isnan(loss)):
                why[step] = said
        except RollBack as back:
            return why, back
    return why, None


def test_the_level_is_the_mean_and_variance_of_what_was_seen():
    level = Level()
    for loss in NOISE:
        level.seen(loss, window=1000)
    assert (level.mean, level.variance) == pytest.approx((np.mean(NOISE), np.var(NOISE)))


def test_after_a_window_older_losses_count_less():
    level = Level()
    for loss in [100.0] * 50 + [2.0] * 500:
        level.seen(loss, window=20)
    assert level.mean == pytest.approx(2.0, abs=1e-6) and level.variance < 1e-6


def test_a_loss_that_jumps_is_a_spike_and_noise_is_none():
    rules = Rules(spike_deviations=7)
    assert judged(rules, NOISE) == ({}, None)
    why, _ = judged(rules, [*NOISE[:100], 2.9, *NOISE[100:]])
    assert list(why) == [101]
    assert why[101].startswith("its loss is 2.9, 9.") and "deviations above the running mean 2." in why[101]
    assert judged(rules, [*NOISE[:100], 1.0, -5.0]) == ({}, None), "only upwards"
    assert judged(Rules(), [*NOISE, 1e9]) == ({}, None), "off unless it is asked for"


def test_early_losses_and_a_falling_one_are_no_spikes():
    rules = Rules(spike_deviations=7)
    assert judged(rules, [*NOISE[:49], 100.0]) == ({}, None)
    assert judged(rules, [10 * math.exp(-step / 50) for step in range(400)]) == ({}, None)
    assert judged(rules, [0.5] * 200 + [0.5001] * 5) == ({}, None), "a standard deviation has a floor"


def test_a_spike_does_not_raise_the_level_and_a_new_level_ends_them():
    rules = Rules(spike_deviations=7)
    why, _ = judged(rules, [*NOISE[:100], *[9.0 + x for x in NOISE]])
    assert list(why) == [*range(101, 101 + NEW_LEVEL)]


@pytest.mark.parametrize(("before", "out"), [(0, [103, 104, 105]), (1, [102, 103, 104, 105]), (200, [*range(1, 106)])])
def test_bad_steps_in_a_row_roll_back_and_are_left_out(before, out):
    rules = Rules(spike_deviations=7, roll_back_after=3, leave_out_before=before)
    losses = [*NOISE[:100], 9.0, NOISE[0], math.nan, 9.0, math.nan]
    why, back = judged(rules, losses)
    assert list(why) == [101, 103, 104] and back.left_out == out and back.before == out[0]
    assert str(back) == "3 bad steps in a row, the last one step 105: its gradient or update was not finite"


def test_a_good_step_ends_the_row():
    rules = Rules(roll_back_after=2)
    why, back = judged(rules, [math.nan, 2.0] * 20)
    assert len(why) == 20 and back is None


@pytest.mark.parametrize("cut", [1, 60, 101, 102, 103])
def test_a_run_that_is_resumed_anywhere_decides_alike(cut):
    rules = Rules(spike_deviations=7, roll_back_after=3)
    losses = [*NOISE[:100], 9.0, 9.0, math.nan, *NOISE[100:]]
    whole, whole_back = judged(rules, losses)
    bad = BadSteps()
    first, _ = judged(rules, losses[:cut], bad)
    stored = json.loads(json.dumps(bad.record()))
    rest, back = judged(rules, losses[cut:], BadSteps.of(stored), start=cut)
    if cut < 103:
        assert first | rest == whole and (back.left_out, back.why) == (whole_back.left_out, whole_back.why)


def test_an_older_run_recorded_nothing_and_another_table_is_refused():
    assert BadSteps.of(None) == BadSteps()
    for damaged in (
        3,
        {},
        {"first": 1},
        {"left_out": 3, "level": {}},
        {**BadSteps().record(), "level": {"count": "x"}},
    ):
        with pytest.raises(ValueError, match="the record of bad steps is a table"):
            BadSteps.of(damaged)


def test_what_was_left_out_before_stays_out():
    bad = BadSteps(left_out=[3, 90])
    with pytest.raises(RollBack) as error:
        Rules(roll_back_after=1).judge(bad, 7, math.nan, skipped=True)
    assert error.value.left_out == [3, 6, 7, 90] and error.value.before == 6


def test_how_often_a_run_went_back_is_forgotten_after_a_good_step():
    rules, bad = Rules(roll_back_after=1), BadSteps()
    for returns in (1, 2, 3):
        _, back = judged(rules, [math.nan], bad, start=2 * returns)
        assert back.returns == returns
        bad = BadSteps()  # as it was in the checkpoint
        bad.went(back)
    judged(rules, [2.0], bad, start=bad.left_out[-1] - 1)
    assert bad.returns == 3, "a step before those that are left out says nothing"
    judged(rules, [2.0], bad, start=bad.left_out[-1])
    assert bad.returns == 0
