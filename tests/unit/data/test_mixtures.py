"""What a mixture promises: its weights in every batch, no sample twice in a part's own epoch, random access."""

import numpy as np
import pytest

from jdp.data import global_batches, mixture, text_data
from jdp.data.mixtures import Concatenated, MixedSamples


class Numbered:
    """Samples that say whose they are and which."""

    def __init__(self, samples, owner=0):
        self.samples, self.owner = samples, owner

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        assert 0 <= index < self.samples
        return {"id": np.array([self.owner, index]), "weights": np.ones(1, np.float32)}


class Data:
    def __init__(self, train, heldout, owner=0, fingerprint="f"):
        self.train, self.heldout, self.fingerprint = Numbered(train, owner), Numbered(heldout, owner), fingerprint

    def __str__(self):
        return f"data of {len(self.train)}"


SIZES, WEIGHTS = (7, 40, 100), (5.0, 1.5, 0.25)


def mixed(seed=0, sizes=SIZES, weights=WEIGHTS):
    return MixedSamples(tuple(Numbered(size, owner) for owner, size in enumerate(sizes)), weights, seed)


def ids(samples):
    return [tuple(sample["id"].tolist()) for sample in samples]


def line(source, count, seed=0, start=0):
    return ids(source.sample_at(position, seed) for position in range(start, start + count))


@pytest.mark.parametrize("weights", [(1.0, 1.0), (5.0, 1.5, 0.25), (1000.0, 1.0), (0.1,) * 10, (3.0,)])
def test_every_stretch_holds_each_part_by_its_weight(weights):
    source = mixed(sizes=(10,) * len(weights), weights=weights)
    owners = np.array([source.turn(position, 0)[0] for position in range(5000)])
    share = np.array(weights) / sum(weights)
    so_far = np.cumsum(owners[:, None] == np.arange(len(weights)), axis=0)
    drift = so_far - np.arange(1, 5001)[:, None] * share
    # Any stretch is a difference of two beginnings. The golden ratio's discrepancy grows as log n: 5 is far above it
    # here, and far below the √n of independent draws.
    assert np.ptp(drift, axis=0).max() < 5


def test_a_part_repeats_nothing_within_its_own_epoch():
    drawn = line(mixed(), 3000)
    for owner, size in enumerate(SIZES):
        own = [index for which, index in drawn if which == owner]
        epochs = [own[start : start + size] for start in range(0, len(own) - size + 1, size)]
        assert len(epochs) >= 1
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert size < 40 or len(set(map(tuple, epochs))) == len(epochs)  # each in an order of its own (7! are too few)


def test_positions_far_away_cost_nothing_and_agree():
    source = mixed()
    turns = [source.turn(10**15 + step, 3) for step in range(300)]
    for owner, weight in enumerate(WEIGHTS):
        own = [turn for which, turn in turns if which == owner]
        assert own == list(range(own[0], own[0] + len(own)))
        assert own[0] == pytest.approx(10**15 * weight / sum(WEIGHTS), rel=1e-8)  # weights are kept to 2⁻³²


def test_the_order_of_a_mixture_never_changes():
    """Runs are resumed under other versions: these numbers may not change."""
    assert line(mixed(seed=3), 6, seed=5) == [(0, 0), (0, 6), (0, 4), (0, 1), (1, 30), (0, 2)]


def test_the_first_epoch_of_a_mixture():
    read = list(global_batches(mixed(), batch_size=10, seed=0, epochs=1))
    assert len(read) == 15 and sum(batch["weights"].sum() for batch in read) == 147 == len(mixed())
    plain = global_batches(mixed(), batch_size=7, seed=9, shuffle=False, epochs=2)
    assert ids({"id": row} for batch in plain for row in batch["id"]) == 2 * line(mixed(), 147)
    assert ids([mixed()[-1]]) == ids([mixed()[146]])
    with pytest.raises(IndexError):
        mixed()[147]


def test_held_out_is_everything_once():
    data = mixture([(Data(5, 3, owner=0), 1), (Data(9, 4, owner=1), 2)], seed=0)
    assert ids(data.heldout) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert ids([data.heldout[-1]]) == [(1, 3)] and len(data.heldout) == 7
    with pytest.raises(IndexError):
        data.heldout[7]
    assert len(Concatenated((Numbered(2), Numbered(3)))) == 5


def test_texts_are_mixed(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name * 400)
    parts = [text_data(tmp_path / f"{name}.txt", length=8) for name in ("a", "b")]
    data = mixture([(parts[0], 3), (parts[1], 1)], seed=1)
    letters = [data.tokenizer.decode(data.train[index]["tokens"][:1]) for index in range(len(data.train))]
    assert letters.count("b") / len(letters) == pytest.approx(0.25, abs=0.05)
    assert data.vocab_size == 256 and data.tokenizer is parts[0].tokenizer
    assert str(data).startswith(f"mixture of 2, an epoch is {len(data.train)} samples: 0.75 of {parts[0]}; 0.25 of ")


@pytest.mark.parametrize(
    ("weights", "seed", "message"),
    [
        ([], 0, "at least one data set; given none"),
        ([Data(5, 3)], 0, r"pairs \(data set, weight\); given .*: swap them"),
        ([1, 0], 0, "weights must be positive numbers of similar size; given 1.0, 0.0"),
        ([1, float("nan")], 0, "given 1.0, nan"),
        ([1e12, 1], 0, r"given 1000000000000.0, 1.0: leave out"),
        ([1, 1], -1, "seed must not be negative; given -1"),
    ],
)
def test_what_is_wrong_with_a_mixture_is_reported(weights, seed, message):
    with pytest.raises(ValueError, match=message):
        mixture([(Data(5, 3), weight) for weight in weights], seed=seed)


def test_parts_must_be_alike(tmp_path):
    (tmp_path / "a.txt").write_text("some text to read " * 10)
    long, short = (text_data(tmp_path / "a.txt", length=length) for length in (8, 9))
    said = r"the same kind of samples; given .*'int32\[8\]'.* and .*'int32\[9\]'.*: open them with the same"
    with pytest.raises(ValueError, match=said):
        mixture([(long, 1), (short, 1)])
