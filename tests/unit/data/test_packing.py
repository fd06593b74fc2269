"""What packing promises: documents whole and apart, every token a target once, few positions empty."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdp.data import TextSamples, text_data
from jdp.data.text.token_array import best_fit

LENGTH = 16


def packed(sizes, length=LENGTH):
    """Documents of these sizes whose tokens are all different: 0, 1, 2, … in order."""
    bounds = np.array(list(itertools.accumulate(sizes, initial=0)), np.int64)
    return TextSamples(np.arange(bounds[-1], dtype=np.uint32), length, bounds, packing="documents")


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=40).filter(lambda sizes: max(sizes) > 1),
    length=st.integers(1, 20),
)
def test_every_token_is_a_target_once(sizes, length):
    samples = packed(sizes, length)
    firsts = set(samples.bounds[:-1].tolist())
    rows = [samples[index] for index in range(len(samples))]
    targets = np.concatenate([row["targets"][row["weights"] == 1] for row in rows])
    assert sorted(targets.tolist()) == [token for token in range(sum(sizes)) if token not in firsts]
    for row in rows:
        counted = row["weights"] == 1
        assert counted.any() and np.array_equal(counted, row["segments"] > 0)
        assert np.array_equal(row["targets"][counted], row["tokens"][counted] + 1)  # never the next document's
        assert not row["tokens"][~counted].any() and not row["targets"][~counted].any()


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 50), min_size=2, max_size=40).filter(lambda sizes: max(sizes) > 1))
def test_a_segment_is_a_piece_of_one_document(sizes):
    samples = packed(sizes)
    for row in (samples[index] for index in range(len(samples))):
        segments = row["segments"]
        count = segments.max()
        assert np.array_equal(segments[segments > 0], np.sort(segments[segments > 0]))
        assert {*segments.tolist()} - {0} == {*range(1, count + 1)}
        assert (segments[np.argmin(segments > 0) :] == 0).all() or (segments > 0).all()  # what is empty is at the end
        for segment in range(1, count + 1):
            of_it = row["tokens"][segments == segment]
            documents = np.searchsorted(samples.bounds, of_it, side="right")
            assert (np.diff(of_it) == 1).all() and len(set(documents.tolist())) == 1


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 17), max_size=60))
def test_rows_are_few(sizes):
    """No two rows would fit into one, so none or one is less than half full."""
    rows = best_fit(sorted(sizes, reverse=True), 17)
    filled = np.bincount(rows, weights=sorted(sizes, reverse=True)) if rows else np.zeros(0)
    assert (filled <= 17).all() and (filled > 0).all()
    assert all(a + b > 17 for a, b in itertools.combinations(filled.tolist(), 2))


def test_short_documents_fill_up_rows():
    samples = packed([2 * LENGTH + 6, 11, 1])  # 37 pairs and 10; one token alone has no target
    assert len(samples) == 3
    assert [samples[index]["tokens"].tolist() for index in range(2)] == [list(range(16)), list(range(16, 32))]
    last = samples[2]
    assert last["tokens"].tolist() == [*range(38, 48), *range(32, 37), 0]
    assert last["segments"].tolist() == [1] * 10 + [2] * 5 + [0]
    assert samples.waste == pytest.approx(1 / 48)


def documents_of(side):
    return sorted(side.ids[start:end].tobytes() for start, end in itertools.pairwise(side.bounds))


def test_text_is_packed_whole(tmp_path):
    texts = [f"chapter {number} {'and so on ' * (number % 7)}" for number in range(60)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    data = text_data(tmp_path, length=96, heldout_fraction=0.3, packing="documents")
    stream = text_data(tmp_path, length=96, heldout_fraction=0.3)
    found = documents_of(data.train) + documents_of(data.heldout)
    assert sorted(found) == sorted(f"{text}\0".encode() for text in texts)
    assert np.array_equal(data.train.ids, stream.train.ids)  # the split does not depend on the packing
    assert data.fingerprint != stream.fingerprint
    assert " of them empty, held out " in str(data)
    for row in map(data.train.__getitem__, range(len(data.train))):
        first = data.tokenizer.decode(row["targets"][row["segments"] == 1])
        assert first.endswith("\0")  # the separator is a target too
