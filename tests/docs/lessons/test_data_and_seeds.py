"""What samplers repeat and drop, on as many ranks and on fewer; masks by key; jdp's are the same on any mesh."""

import numpy as np
import pytest
from load import load

lesson = load("data_and_seeds")
N, SAMPLES, BATCH = lesson.RANKS, lesson.SAMPLES, lesson.BATCH


@pytest.mark.parametrize(
    ("name", "missed", "repeated", "different"),
    [
        ("one seed, no parts", SAMPLES - SAMPLES // N, SAMPLES // N, BATCH // N),
        ("DistributedSampler", 0, -SAMPLES % N, BATCH),
        ("the same, drop_last", SAMPLES % N, 0, BATCH),
    ],
)
def test_samplers(name, missed, repeated, different):
    assert lesson.counted(lesson.SAMPLERS[name]) == (missed, repeated, different)


def test_a_seed_for_each_rank_misses_a_third():
    missed, repeated, _ = lesson.counted(lesson.SAMPLERS["a seed for each rank"])
    assert missed / SAMPLES == pytest.approx((1 - 1 / N) ** N, abs=0.05) and repeated > 0


def test_positions_of_two_epochs_are_each_sample_twice():
    end = 2 * SAMPLES * BATCH  # whole batches and whole epochs
    read = np.concatenate([lesson.positions(rank, N, end - 2 * SAMPLES * 20, end) for rank in range(N)])
    assert (np.bincount(read, minlength=SAMPLES) == 40).all()


def test_only_positions_go_on_with_fewer_ranks():
    assert lesson.resumed("by position", 15) == (SAMPLES % BATCH, 0)
    assert lesson.resumed("as many rows a rank", 15)[1] > 0
    assert lesson.resumed("from the epoch's start", 15)[1] >= 15 * BATCH


def test_masks_by_key():
    different = {way: len(np.unique(lesson.masks(way, N), axis=0)) for way in lesson.KEYS}
    assert different == {"one key": BATCH // N, "a key for each rank": BATCH, "by global row": BATCH}
    same = {way for way in lesson.KEYS if (lesson.masks(way, 1) == lesson.masks(way, N)).all()}
    assert same == {"by global row"}


def test_dropout_is_the_same_on_any_mesh():
    one, eight = lesson.learnt_by_jdp(1), lesson.learnt_by_jdp(8)
    assert np.ptp(one) > 0.01
    np.testing.assert_allclose(one, eight, atol=1e-5)  # float32 sums of 40 rows in another order
