"""The global order of samples, as properties: any data, batch size, processes and step at which a run resumes; and even
shuffles, of which only own rows are read.

Processes are simulated: each walks its own iterator of its own rows, which is all that a real one does.
"""

import itertools
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdp.data import augmented, batch_count, global_batches, sample_index
from jdp.data.arrays import ArraySamples
from jdp.data.images.decode import Frame
from jdp.data.images.samples import ImageSamples, Normalised
from jdp.data.images.sources import array_pictures
from jdp.data.mixtures import MixedSamples
from jdp.data.text.samples import TextSamples

few = settings(derandomize=True, deadline=None, max_examples=60)
sizes = st.integers(1, 40)
seeds = st.integers(0, 2**40)
batch_sizes = st.integers(1, 17)


def vectors(samples):
    arrays = {"features": np.arange(3 * samples).reshape(-1, 3), "n": np.arange(samples)}
    return ArraySamples(arrays, np.arange(samples))


def rows_of_a_table(samples):
    """A side of a split: every third row of more."""
    tokens = np.arange(3 * samples)[:, None] + np.arange(5)
    return ArraySamples({"tokens": tokens}, np.arange(samples) * 3 + 1)


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


def mixed(samples):
    """By weight, so that an epoch is no permutation; an order of its own."""
    return MixedSamples((vectors(samples), vectors(samples // 2 + 1)), (0.2, 0.8), seed=3)


def redrawn(samples):
    """Cropped and flipped anew in every epoch."""
    return augmented(images(samples), crop_padding=1, flip=True, seed=3)


SOURCES = (vectors, rows_of_a_table, images, text, packed)
sources = st.builds(lambda kind, samples: kind(samples), st.sampled_from(SOURCES), sizes)
all_sources = sources | st.builds(mixed, sizes) | st.builds(redrawn, sizes)


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


def numbered(source):
    """What a sample holds -> its index: samples are distinguished by their content alone, weights aside."""
    numbers = {key_of(source[index]): index for index in range(len(source))}
    assert len(numbers) == len(source)
    return numbers


def key_of(sample):
    return b"".join(np.asarray(sample[key]).tobytes() for key in sorted(sample) if key != "weights")


def sequence_of(source, batches):
    """int [batches, rows]: the sample at each position; float [batches, rows]: the sum of its weights."""
    numbers = numbered(source)
    indices, weights = [], []
    for batch in batches:
        rows = [{key: array[row] for key, array in batch.items()} for row in range(len(batch["weights"]))]
        indices.append([numbers[key_of(row)] for row in rows])
        weights.append([row["weights"].sum() for row in rows])
    return np.array(indices), np.array(weights)


def together(source, partition, **run):
    """The global batches, put together from what each process read of them."""
    parts = [list(global_batches(source, rows=rows, **run)) for rows in partition]
    assert len({len(part) for part in parts}) == 1  # all stop together
    order = np.argsort(np.concatenate(partition))
    batches = zip(*parts, strict=True)
    return [{key: np.concatenate([part[key] for part in batch])[order] for key in batch[0]} for batch in batches]


@few
@given(runs(all_sources))
def test_processes_read_the_same_global_batches(run):
    source, partition, epochs, settings = run
    alone = list(global_batches(source, epochs=epochs, **settings))
    shared = together(source, partition, epochs=epochs, **settings)
    assert len(alone) == len(shared) == batch_count(source, batch_size=settings["batch_size"], epochs=epochs)
    for one, other in zip(alone, shared, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], other[key], strict=True)


@few
@given(runs())
def test_an_epoch_has_every_sample_once(run):
    source, partition, epochs, settings = run
    batches = together(source, partition, epochs=epochs, **settings)
    indices, weights = sequence_of(source, batches)
    real = epochs * len(source)
    sequence, inorder = indices.flatten()[:real].reshape(epochs, len(source)), np.arange(len(source))
    assert np.array_equal(np.sort(sequence), np.tile(inorder, (epochs, 1)))
    assert settings["shuffle"] or np.array_equal(sequence, np.sort(sequence))
    own = np.array([source[index]["weights"].sum() for index in range(len(source))])
    np.testing.assert_array_equal(weights.flatten()[:real], own[sequence.flatten()])
    assert not weights.flatten()[real:].any()
    # The batches themselves: all of one shape, the last one filled.
    assert {batch["weights"].shape[0] for batch in batches} == {settings["batch_size"]}
    assert indices.size - real < settings["batch_size"]


@few
@given(runs(all_sources), st.data())
def test_a_run_resumes_on_other_processes(run, data):
    source, partition, epochs, settings = run
    whole = together(source, partition, epochs=epochs, **settings)
    start = data.draw(st.integers(0, len(whole)), label="start")
    others = data.draw(partitions(settings["batch_size"]), label="other processes")
    resumed = together(source, others, epochs=epochs, start=start, **settings)
    assert len(resumed) == len(whole) - start
    for one, other in zip(resumed, whole[start:], strict=True):
        np.testing.assert_equal(one, other)


@few
@given(sources, seeds, st.lists(batch_sizes, min_size=2, max_size=2), st.integers(1, 4))
def test_the_batch_size_changes_no_order(source, seed, batch_sizes, threads):
    def sequence(batch_size):
        batches = global_batches(source, batch_size=batch_size, seed=seed, epochs=2, threads=threads)
        return sequence_of(source, list(batches))[0].flatten()[: 2 * len(source)]

    np.testing.assert_array_equal(*map(sequence, batch_sizes))


@settings(few, max_examples=200)
@given(st.integers(1, 3000), seeds, st.integers(0, 2**20))
def test_any_epoch_is_a_permutation(samples, seed, epoch):
    order = [sample_index(seed, samples, epoch * samples + index) for index in range(samples)]
    assert sorted(order) == list(range(samples))


@settings(few, max_examples=50)
@given(st.integers(2**16, 2**32), seeds, st.integers(0, 2**50), st.integers(2, 50))
def test_a_long_epoch_repeats_no_sample(samples, seed, position, count):
    """A window of it, anywhere, inside of one epoch: all different, all there."""
    position -= max(0, position % samples + count - samples)
    found = [sample_index(seed, samples, position + offset) for offset in range(count)]
    assert len(set(found)) == count and all(0 <= index < samples for index in found)


class Counted:
    """Samples that are their own index, and a list of the reads."""

    def __init__(self, samples):
        self.samples, self.reads = samples, []

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        assert 0 <= index < self.samples
        self.reads.append(index)
        return {"tokens": np.full(3, index, np.int32), "weights": np.ones(3, np.float32)}


def indices(batches):
    """int [batches, rows]: which sample stands there, -1 for padding."""
    return np.array([np.where(batch["weights"][:, 0] > 0, batch["tokens"][:, 0], -1) for batch in batches])


@pytest.mark.parametrize("samples", [257, 2**16 + 3])
def test_epochs_and_seeds_have_orders_of_their_own(samples):
    def order(seed, epoch):
        return tuple(sample_index(seed, samples, epoch * samples + index) for index in range(50))

    orders = {(seed, epoch): order(seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len(set(orders.values())) == len(orders)  # in particular: epoch 1 of seed 0 is not epoch 0 of seed 1


@pytest.mark.parametrize("samples", [3, 7])
def test_shuffles_are_even(samples):
    """Each sample is at each position equally often: chi-squared over 2,000 epochs, well inside five deviations."""
    epochs = 2000
    counts = np.zeros((samples, samples))
    for epoch in range(epochs):
        for index in range(samples):
            counts[index, sample_index(0, samples, epoch * samples + index)] += 1
    freedom = (samples - 1) ** 2
    chi_squared = ((counts - epochs / samples) ** 2 / (epochs / samples)).sum()
    assert abs(chi_squared - freedom) < 5 * np.sqrt(2 * freedom)


def test_the_order_is_the_same_for_ever():
    """Runs are resumed under other versions of NumPy and grain: these numbers may not change."""
    assert [sample_index(0, 10, position) for position in range(12)] == [1, 4, 5, 6, 8, 2, 0, 3, 9, 7, 7, 8]
    assert [sample_index(0, 10**6, at) for at in (0, 1, 2, 10**6, 10**6 + 1)] == [874232, 949262, 79955, 996274, 204535]


@pytest.mark.parametrize("rows", [slice(1, None, 3), [4, 0], np.array([2, 3])])
def test_rows_come_in_the_order_asked_for(rows):
    whole = indices([*islice(global_batches(Counted(20), batch_size=6, seed=3), 4)])
    mine = indices([*islice(global_batches(Counted(20), batch_size=6, seed=3, rows=rows), 4)])
    assert np.array_equal(mine, whole[:, rows])


def test_a_late_start_costs_nothing():
    source = Counted(2**16 + 3)
    [batch] = [*islice(global_batches(source, batch_size=4, seed=0, start=np.int32(10**9)), 1)]
    assert batch["tokens"][:, 0].tolist() == [sample_index(0, len(source), 4 * 10**9 + row) for row in range(4)]
    assert len(source.reads) <= 4 * 6  # this batch and those read ahead


def test_another_batch_size_goes_on():
    small = [*islice(global_batches(Counted(20), batch_size=3, seed=1), 4)]
    wide = [*islice(global_batches(Counted(20), batch_size=5, seed=1, start=1, samples=3), 2)]
    assert np.concatenate(indices(wide))[:9].tolist() == np.concatenate(indices(small))[3:].tolist()
    with pytest.raises(ValueError, match="samples must not be negative; given -1"):
        global_batches(Counted(20), batch_size=3, seed=1, samples=-1)


def test_only_own_rows_are_read():
    source = Counted(20)
    list(global_batches(source, batch_size=4, seed=1, rows=[1, 3], epochs=1))
    assert sorted(source.reads) == sorted(sample_index(1, 20, 4 * batch + row) for batch in range(5) for row in (1, 3))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"source": iter([])}, r"has len and \[index\]; given a list_iterator\. Give data\.train or"),
        ({"batch_size": 0}, "batch_size must be at least 1; given 0"),
        ({"seed": -1}, "seed must not be negative; given -1"),
        ({"epochs": 0}, "epochs must be at least 1; given 0"),
        ({"start": 4, "epochs": 1}, "start must be a batch of the run, 0 to 3; given 4"),
        ({"rows": []}, r"at least one row .* given \[\]"),
        ({"rows": [0, 4]}, r"each from 0 to 3; given \[0, 4\]"),
    ],
)
def test_a_wrong_run_is_refused_at_once(wrong, message):
    with pytest.raises(ValueError, match=message):
        global_batches(**({"source": Counted(12), "batch_size": 4, "seed": 0} | wrong))
