"""The global order of samples, as properties: whatever the data, the batch size, the processes and where a run resumes.

Processes are simulated: each walks its own iterator of its own rows, which is all that a real one does.
"""

import itertools

import numpy as np
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
