"""The global order of samples, as properties: any data, batch size, processes and step at which a run resumes; even
shuffles, of which only own rows are read. Mixtures: weights in every batch, no sample twice in a part's own epoch.

Processes are simulated: each walks its own iterator of its own rows, which is all that a real one does.
"""

import itertools
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdp.data import augmented, batch_count, global_batches, mixture, sample_index, text_data
from jdp.data.arrays import ArraySamples
from jdp.data.images import ImageSamples, Normalised
from jdp.data.mixtures import MixedSamples
from jdp.data.pictures import Frame, array_pictures
from jdp.data.text.samples import TextSamples

few = settings(derandomize=True, deadline=None, max_examples=60)
sizes = st.integers(1, 40)
seeds = st.integers(0, 2**40)
batch_sizes = st.integers(1, 17)


def vectors(samples):
    """A side of a split: every third row of more."""
    arrays = {"features": np.arange(9 * samples).reshape(-1, 3), "tokens": np.arange(6 * samples).reshape(-1, 2)}
    return ArraySamples(arrays, np.arange(samples) * 3 + 1)


def images(samples):
    values = np.broadcast_to(np.arange(samples, dtype=np.uint8)[:, None, None], (samples, 2, 2)).copy()
    pictures = array_pictures(values, np.arange(samples), "squares")
    return ImageSamples(pictures, np.arange(samples), Frame(None, 1), (2, 2, 1), Normalised((0.5,), (0.5,)))


def text(samples):
    """Samples of four; the last one has a single target, the rest of it is filled."""
    return TextSamples(np.arange(4 * samples - 2).astype(np.uint8), length=4)


def packed(samples):
    """Documents of five tokens, a row each."""
    return TextSamples(np.arange(5 * samples), 4, bounds=np.arange(samples + 1) * 5, packing="documents")


def by_weight(samples):
    """By weight, so that an epoch is no permutation; an order of its own."""
    return MixedSamples((vectors(samples), vectors(samples // 2 + 1)), (0.2, 0.8), seed=3)


def redrawn(samples):
    """Cropped and flipped anew in every epoch."""
    return augmented(images(samples), crop_padding=1, flip=True, seed=3)


SOURCES = (vectors, images, text, packed)
sources = st.builds(lambda kind, samples: kind(samples), st.sampled_from(SOURCES), sizes)
all_sources = sources | st.builds(by_weight, sizes) | st.builds(redrawn, sizes)


@st.composite
def partitions(draw, batch_size):
    """The rows of one to four processes: contiguous or not, uneven, each at least one."""
    processes = draw(st.integers(1, min(4, batch_size)))
    rows = draw(st.permutations(range(batch_size)))
    cuts = draw(st.sets(st.integers(1, max(1, batch_size - 1)), min_size=processes - 1, max_size=processes - 1))
    edges = [0, *sorted(cuts), batch_size]
    return [rows[a:b] for a, b in itertools.pairwise(edges)]


@st.composite
def runs(draw, sources=sources):
    """A source, a batch size, the rows of each process, a seed, epochs, and whether to shuffle."""
    source, batch_size = draw(sources), draw(batch_sizes)
    settings = {"batch_size": batch_size, "seed": draw(seeds), "shuffle": draw(st.booleans())}
    return source, draw(partitions(batch_size)), draw(st.integers(1, 3)), settings


def key_of(sample):
    """What distinguishes a sample: its content, weights aside."""
    return b"".join(np.asarray(sample[key]).tobytes() for key in sorted(sample) if key != "weights")


def together(source, partition, **run):
    """The global batches, put together from what each process read of them."""
    parts = [list(global_batches(source, rows=rows, **run)) for rows in partition]
    assert len({len(part) for part in parts}) == 1  # all stop together
    order = np.argsort(np.concatenate(partition))
    batches = zip(*parts, strict=True)
    return [{key: np.concatenate([part[key] for part in batch])[order] for key in batch[0]} for batch in batches]


@settings(few, max_examples=120)
@given(runs(all_sources), st.data())
def test_processes_read_the_same_global_batches(run, data):
    """From any batch on: so a run also resumes on other processes."""
    source, partition, epochs, settings = run
    alone = list(global_batches(source, epochs=epochs, **settings))
    assert len(alone) == batch_count(source, batch_size=settings["batch_size"], epochs=epochs)
    start = data.draw(st.integers(0, len(alone)), label="start")
    shared = together(source, partition, epochs=epochs, start=start, **settings)
    assert len(shared) == len(alone) - start
    for one, other in zip(shared, alone[start:], strict=True):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], other[key], strict=True)


@few
@given(runs())
def test_an_epoch_has_every_sample_once(run):
    source, partition, epochs, settings = run
    batches = together(source, partition, epochs=epochs, **settings)
    count = settings["batch_size"]
    rows = [{key: array[row] for key, array in batch.items()} for batch in batches for row in range(count)]
    keys = [key_of(source[index]) for index in range(len(source))]
    assert len(set(keys)) == len(source)
    real, inorder = epochs * len(source), np.arange(len(source))
    sequence = np.array([keys.index(key_of(row)) for row in rows[:real]])
    assert np.array_equal(np.sort(sequence.reshape(epochs, -1)), np.tile(inorder, (epochs, 1)))
    assert settings["shuffle"] or np.array_equal(sequence, np.tile(inorder, epochs))
    assert [row["weights"].sum() for row in rows[:real]] == [source[index]["weights"].sum() for index in sequence]
    assert not any(row["weights"].any() for row in rows[real:])
    assert {batch["weights"].shape[0] for batch in batches} == {count} and len(rows) - real < count


@settings(few, max_examples=200)
@given(st.integers(1, 3000) | st.integers(2**16, 2**32), seeds, st.integers(0, 2**50), st.integers(1, 3000))
def test_an_epoch_repeats_no_sample(samples, seed, position, count):
    """A window of it, anywhere, inside of one epoch, or all of it: all different, all there."""
    count = min(count, samples, 3000 if samples < 2**16 else 50)
    position -= max(0, position % samples + count - samples)
    found = [sample_index(seed, samples, position + offset) for offset in range(count)]
    assert len(set(found)) == count and all(0 <= index < samples for index in found)


class Numbered:
    """Samples that say whose they are and which, and a list of the reads."""

    def __init__(self, samples, owner=0):
        self.samples, self.owner, self.reads = samples, owner, []

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        assert 0 <= index < self.samples
        self.reads.append(index)
        return {"id": np.array([self.owner, index]), "weights": np.ones(1, np.float32)}


def indices(batches):
    """int [batches, rows]: which sample stands there, -1 for padding."""
    return np.array([np.where(batch["weights"][:, 0] > 0, batch["id"][:, 1], -1) for batch in batches])


@pytest.mark.parametrize("samples", [257, 2**16 + 3])
def test_epochs_and_seeds_have_orders_of_their_own(samples):
    """In particular: epoch 1 of seed 0 is not epoch 0 of seed 1."""
    runs = itertools.product(range(3), range(3))
    orders = {tuple(sample_index(seed, samples, epoch * samples + i) for i in range(50)) for seed, epoch in runs}
    assert len(orders) == 9


@pytest.mark.parametrize("samples", [3, 7])
def test_shuffles_are_even(samples):
    """Each sample is at each position equally often: chi-squared over 2,000 epochs, well inside five deviations."""
    order = np.array([sample_index(0, samples, position) for position in range(2000 * samples)]).reshape(-1, samples)
    counts = np.stack([np.bincount(column, minlength=samples) for column in order.T])
    freedom = (samples - 1) ** 2
    chi_squared = ((counts - 2000 / samples) ** 2 / (2000 / samples)).sum()
    assert abs(chi_squared - freedom) < 5 * np.sqrt(2 * freedom)


def test_the_order_is_the_same_for_ever():
    """Runs are resumed under other versions of NumPy and grain: these numbers may not change."""
    assert [sample_index(0, 10, position) for position in range(12)] == [1, 4, 5, 6, 8, 2, 0, 3, 9, 7, 7, 8]
    assert [sample_index(0, 10**6, at) for at in (0, 1, 2, 10**6, 10**6 + 1)] == [874232, 949262, 79955, 996274, 204535]


@pytest.mark.parametrize("rows", [slice(1, None, 3), [4, 0], np.array([2, 3])])
def test_only_own_rows_are_read_in_the_order_asked_for(rows):
    source = Numbered(20)
    whole = indices(global_batches(Numbered(20), batch_size=6, seed=3, epochs=1))
    assert np.array_equal(indices(global_batches(source, batch_size=6, seed=3, epochs=1, rows=rows)), whole[:, rows])
    own = np.arange(6)[rows]
    assert sorted(source.reads) == sorted(sample_index(3, 20, 6 * batch + row) for batch in range(4) for row in own)


def test_a_late_start_costs_nothing():
    source = Numbered(2**16 + 3)
    [batch] = [*islice(global_batches(source, batch_size=4, seed=0, start=np.int32(10**9)), 1)]
    assert batch["id"][:, 1].tolist() == [sample_index(0, len(source), 4 * 10**9 + row) for row in range(4)]
    assert len(source.reads) <= 4 * 6  # this batch and those read ahead


def test_another_batch_size_goes_on():
    small = [*islice(global_batches(Numbered(20), batch_size=3, seed=1), 4)]
    wide = [*global_batches(Numbered(20), batch_size=5, seed=1, start=1, samples=3, epochs=1)]
    assert len(wide) == 4 and np.concatenate(indices(wide))[:9].tolist() == np.concatenate(indices(small))[3:].tolist()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"source": iter([])}, r"has len and \[index\]; given a list_iterator\. Give data\.train or"),
        ({"batch_size": 0}, "batch_size must be at least 1; given 0"),
        ({"seed": -1}, "seed and position must not be negative; given -1 and 0"),
        ({"epochs": 0}, "epochs must be at least 1; given 0"),
        ({"start": 4, "epochs": 1}, "start must be a batch of the run, 0 to 3, .*; given 4"),
        ({"samples": -1}, "and samples not negative; given 0 and -1"),
        ({"rows": []}, r"at least one row .* given \[\]"),
        ({"rows": [0, 4]}, r"each from 0 to 3; given \[0, 4\]"),
    ],
)
def test_a_wrong_run_is_refused_at_once(wrong, message):
    with pytest.raises(ValueError, match=message):
        global_batches(**({"source": Numbered(12), "batch_size": 4, "seed": 0} | wrong))


def data_of(train, heldout, owner=0):
    return SimpleNamespace(train=Numbered(train, owner), heldout=Numbered(heldout, owner), fingerprint="f")


SIZES, WEIGHTS = (7, 40, 100), (5.0, 1.5, 0.25)


def mixed(seed=0, sizes=SIZES, weights=WEIGHTS):
    return MixedSamples(tuple(Numbered(size, owner) for owner, size in enumerate(sizes)), weights, seed)


def ids(samples):
    return [tuple(sample["id"].tolist()) for sample in samples]


def line(source, count, seed=0):
    return ids(source.sample_at(position, seed) for position in range(count))


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
        assert epochs and all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert size < 40 or len(set(map(tuple, epochs))) == len(epochs)  # each in an order of its own (7! are too few)


def test_positions_far_away_cost_nothing_and_agree():
    """The order never changes: runs are resumed under other versions."""
    assert line(mixed(seed=3), 6, seed=5) == [(0, 0), (0, 6), (0, 4), (0, 1), (1, 30), (0, 2)]
    turns = [mixed().turn(10**15 + step, 3) for step in range(300)]
    for owner, weight in enumerate(WEIGHTS):
        own = [turn for which, turn in turns if which == owner]
        assert own == list(range(own[0], own[0] + len(own)))
        assert own[0] == pytest.approx(10**15 * weight / sum(WEIGHTS), rel=1e-8)  # weights are kept to 2⁻³²


def test_the_first_epoch_of_a_mixture():
    read = list(global_batches(mixed(), batch_size=10, seed=0, epochs=1))
    assert len(read) == 15 and sum(batch["weights"].sum() for batch in read) == 147 == len(mixed())
    [plain] = global_batches(mixed(), batch_size=294, seed=9, shuffle=False, epochs=2)
    for owner, size in enumerate(SIZES):
        own = plain["id"][plain["id"][:, 0] == owner, 1]
        assert len(own) and np.array_equal(own, np.arange(len(own)) % size)
    assert ids([mixed()[-1]]) == ids([mixed()[146]])
    with pytest.raises(IndexError):
        mixed()[147]


def test_held_out_is_everything_once():
    data = mixture([(data_of(5, 3, owner=0), 1), (data_of(9, 4, owner=1), 2)], seed=0)
    assert ids(data.heldout) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert ids([data.heldout[-1]]) == [(1, 3)] and len(data.heldout) == 7
    with pytest.raises(IndexError):
        data.heldout[7]


def test_texts_are_mixed(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name * 400)
    parts = [text_data(tmp_path / f"{name}.txt", length=8) for name in ("a", "b")]
    data = mixture([(parts[0], 3), (parts[1], 1)], seed=1)
    letters = [data.tokenizer.decode(data.train[index]["tokens"][:1]) for index in range(len(data.train))]
    assert letters.count("b") / len(letters) == pytest.approx(0.25, abs=0.05)
    assert data.vocab_size == 256 and data.tokenizer is parts[0].tokenizer
    assert str(data).startswith(f"mixture of 2, an epoch is {len(data.train)} samples: 0.75 of {parts[0]}; 0.25 of ")
    said = r"the same kind of samples; given .*'int32\[8\]'.* and .*'int32\[9\]'.*: open them with the same"
    with pytest.raises(ValueError, match=said):
        mixture([(parts[0], 1), (text_data(tmp_path / "a.txt", length=9), 1)])


@pytest.mark.parametrize(
    ("weights", "seed", "message"),
    [
        ([], 0, "a mixture must have pairs .*; given none"),
        ([data_of(5, 3)], 0, r"must have pairs \(data set, weight\), .*; given a SimpleNamespace: fix"),
        ([1, 0], 0, "with positive weights of similar size; given 1, 0"),
        ([1, float("nan")], 0, "given 1, nan"),
        ([1e12, 1], 0, r"given 1000000000000.0, 1: fix"),
        ([1, 1], -1, "seed must not be negative; given -1"),
    ],
)
def test_what_is_wrong_with_a_mixture_is_reported(weights, seed, message):
    with pytest.raises(ValueError, match=message):
        mixture([(data_of(5, 3), weight) for weight in weights], seed=seed)
