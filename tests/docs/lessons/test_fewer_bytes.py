"""Bytes of every scheme by its formula, counted in the program; what top-k loses without error feedback."""

import jax
import numpy as np
import optax
import pytest
from load import load

import jdp

lesson, by_hand = load("fewer_bytes"), load("topk")
KERNELS, SHARE = (64 * 256, 256 * 10), 7 / 8
PADDED = 8 * sum(-(-size // 8 // 256) * 256 for size in KERNELS)  # of each device's part, to blocks of 256
SMALL = 2 * SHARE * 4 * 10 + SHARE * 4 * 256  # biases: one is all-reduced, one is sharded, and too small to be encoded
GRADIENTS = {
    None: SHARE * 4 * sum(KERNELS) + SMALL,
    "bf16": SHARE * 2 * PADDED + SMALL,
    "int8": SHARE * PADDED * (1 + 4 / 256) + SMALL,
}


@pytest.fixture(scope="module")
def started():
    plan = jdp.Plan(jdp.make_mesh(data=8), "zero1", min_shard_size=64)
    return plan, jdp.init_state(lesson.init, optax.adam(lesson.RATE), plan, rng=jax.random.key(0))


@pytest.mark.parametrize("wire", lesson.WIRES)
@pytest.mark.default_ids("None", "int8")
def test_bytes_are_the_formula_s(started, wire):
    plan, start = started
    # eight scalars, the loss's too, and two sums for each parameter whose update is checked
    assert lesson.train(plan, wire, start, 0)[0] == pytest.approx(GRADIENTS[wire], abs=200)


@pytest.mark.rest
def test_int8_trains_as_well(started):
    plan, start = started
    losses = [lesson.train(plan, wire, start, 20)[1] for wire in (None, "int8")]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)  # measured 1e-4 to 9e-4


def test_the_largest_elements_of_each_device():
    x = np.array([[[3.0, -4.0], [1.0, 2.0]], [[0.0, 1.0], [-5.0, 2.0]]])
    np.testing.assert_array_equal(by_hand.largest(x, 0.5), [[[3, -4], [0, 0]], [[0, 0], [-5, 2]]])


@pytest.mark.rest
def test_only_what_top_k_drops_is_missed():
    given = (1, True), (0.01, True), (0.01, False)
    whole, kept, dropped = (by_hand.topk_by_hand(*each, 20, lesson.RATE) for each in given)
    assert whole < kept < dropped
