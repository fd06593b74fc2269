"""What batches promise beside `test_order_properties.py`: even shuffles, only own rows read, nothing silent."""

from itertools import islice

import numpy as np
import pytest

from jdp.data import global_batches, sample_index


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
    [batch] = [*islice(global_batches(source, batch_size=4, seed=0, start=10**9), 1)]
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
        global_batches(Counted(12), **({"batch_size": 4, "seed": 0} | wrong))
