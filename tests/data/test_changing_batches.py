"""Batches whose size, length or mixture changes: what batch b reads follows from b alone.

Processes are simulated: each walks its own iterator of its own rows, which is all that a real one does.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdp.base.by_step import ByStep
from jdp.data import array_data, batch_count, global_batches, mixture
from jdp.data.mixtures import MixedSamples
from jdp.data.text.cut import CutSamples
from jdp.data.text.samples import TextSamples

few = settings(derandomize=True, deadline=None, max_examples=40)
WHOLE, TOKENS = 8, 20
starts = st.lists(st.integers(1, 12), unique=True, max_size=3).map(sorted)


@st.composite
def by_step(draw, values):
    return ByStep.of([(start, draw(values)) for start in (0, *draw(starts))])


def samples(count):
    return [{"tokens": np.arange(WHOLE) + WHOLE * i} for i in range(count)]


@few
@given(
    sizes=by_step(st.sampled_from([2, 4, 8])), weights=by_step(st.sampled_from([0.0, 1.0, 3.0])), at=st.integers(0, 14)
)
def test_any_number_of_processes_reads_the_same_rows_from_any_step_on(sizes, weights, at):
    sources = (samples(TOKENS), [{"tokens": -row["tokens"]} for row in samples(5)])
    changes = zip(weights.starts[1:], weights.values[1:], strict=True)
    mixed = MixedSamples(sources, (1.0, weights.values[0]), 0, tuple((p, (1.0, weight)) for p, weight in changes))
    rows = CutSamples(mixed, WHOLE, ByStep.of([(0, 2), (sizes.total(5), 8)]), shuffle=True)

    def read(start, own=None, count=16):
        batches = global_batches(rows, batch_size=sizes, seed=1, rows=own, start=start)
        return [batch["tokens"] for batch in itertools.islice(batches, count - start)]

    whole = read(0)
    assert [len(batch) for batch in whole] == [sizes.at(step) for step in range(16)]
    assert [batch.shape[1] for batch in whole] == [2] * 5 + [8] * 11
    parts = [read(at, lambda size, rank=rank: range(rank * size // 2, (rank + 1) * size // 2)) for rank in range(2)]
    for expected, again, *found in zip(whole[at:], read(at), *parts, strict=True):
        np.testing.assert_array_equal(again, expected)
        np.testing.assert_array_equal(np.concatenate(found), expected)


@few
@given(lengths=by_step(st.sampled_from([1, 2, 4, 8])))
def test_rows_that_are_cut_repeat_no_token_and_pass_over_less_than_a_row_at_a_change(lengths):
    rows = CutSamples(samples(TOKENS), WHOLE, lengths, shuffle=False)
    read = [rows.sample_at(row, 0)["tokens"] for row in range(14)]
    assert [len(row) for row in read] == [lengths.at(row) for row in range(14)]
    for before, after in itertools.pairwise(read):
        assert after[0] % len(after) == 0  # in one sample
        passed = after[0] - before[-1] - 1
        assert passed == 0 if len(before) == len(after) else 0 <= passed < len(after)
    assert [rows.begun(row) for row in range(14)] == [-(-int(row[0]) // WHOLE) for row in read]


def test_targets_follow_their_tokens_over_a_cut():
    text = TextSamples(np.arange(40, dtype=np.uint8), length=WHOLE)
    rows = CutSamples(text, WHOLE, ByStep.of([(0, 2)]), shuffle=False)
    for row in map(rows.__getitem__, range(8)):
        assert row["targets"].tolist() == (row["tokens"] + 1).tolist() and row["weights"].tolist() == [1, 1]


def test_an_epoch_of_changing_batches_ends_with_its_samples():
    source = [{"x": np.array(i), "weights": np.ones(())} for i in range(11)]
    sizes = [(0, 2), (2, 4)]
    assert batch_count(source, batch_size=sizes) == 4
    batches = [*global_batches(source, batch_size=sizes, seed=0, epochs=1)]
    assert [batch["weights"].tolist() for batch in batches] == [[1, 1], [1, 1], [1] * 4, [1, 1, 1, 0]]
    assert sorted(int(x) for batch in batches for x in batch["x"][batch["weights"] > 0]) == [*range(11)]


def test_weights_that_change_keep_every_parts_own_order():
    """The turns of each part go on where they were; from its position on each share is the new one."""
    mixed, seen = MixedSamples((range(50), range(70)), (1.0, 1.0), 0, ((100, (3.0, 1.0)), (300, (0.0, 1.0)))), [0, 0]
    counts = []
    for position in range(400):
        source, turn = mixed.turn(position, 0)
        assert turn == seen[source]
        seen[source] += 1
        counts.append([*seen])
    assert counts[99][0] == pytest.approx(50, abs=3)  # the golden ratio's discrepancy, as in test_mixtures
    assert counts[299][0] - counts[99][0] == pytest.approx(150, abs=3) and counts[399][0] == counts[299][0]


WRONG = {
    "no pairs": ([[0, 4, 5]], "batch_size must be one value, or pairs of a step and a value"),
    "another beginning": ([(1, 4)], "batch_size must have steps that ascend from 0"),
    "not ascending": ([(0, 4), (5, 8), (5, 4)], "batch_size must have steps that ascend from 0"),
    "no size": ([(0, 4), (5, 0)], "batch_size must be at least 1; given 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_size_is_one_sentence(case):
    sizes, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        global_batches(samples(4), batch_size=sizes, seed=0)


def test_rows_of_one_size_are_refused_where_it_changes():
    with pytest.raises(ValueError, match=r"rows must be a function of the size .* given range\(0, 2\)"):
        global_batches(samples(4), batch_size=[(0, 2), (3, 4)], seed=0, rows=range(2))


@pytest.mark.parametrize(
    "weights", [(0, 1), ([(0, 0)], 1), ([(0, 0), (5, 1)], [(0, 0)]), ([(0, -1), (5, 1)], 1), ([(1, 2)], 1)]
)
def test_a_wrong_weight_is_one_sentence(weights):
    data = [array_data({"x": np.arange(40)}, heldout_fraction=0.1) for _ in weights]
    with pytest.raises(
        ValueError, match=r"(must be positive numbers of like size|must have steps that ascend from 0.*); given"
    ):
        mixture([*zip(data, weights, strict=True)])
