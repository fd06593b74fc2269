"""Bytes of every scheme by its formula, counted in the program; what top-k loses without error feedback."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from load import load

import jdp

lesson, by_hand = load("fewer_bytes"), load("topk")
KERNELS, SHARE = (64 * 256, 256 * 10), 7 / 8
PADDED = 8 * sum(-(-size // 8 // 256) * 256 for size in KERNELS)  # of each device's part, to blocks of 256
FACTORS = 4 * (64 + 256 + 256 + 10)
BIAS = SHARE * 4 * 256  # sharded, and too small to be encoded
SMALL = 2 * SHARE * 4 * 10 + BIAS  # the other bias is all-reduced
GRADIENTS = {
    "none": SHARE * 4 * sum(KERNELS) + SMALL,
    "bf16": SHARE * 2 * PADDED + SMALL,
    "fp8": SHARE * PADDED * (1 + 4 / 256) + SMALL,
    "int8": SHARE * PADDED * (1 + 4 / 256) + SMALL,
    "int8, weights too": SHARE * PADDED * (1 + 4 / 256) + SMALL,
    "topk 1 %": SHARE * 8 * 8 * 26 + SMALL,  # of 2048 + 512 elements in a bucket, rounded up; value and position
    "powersgd, rank 4": 2 * SHARE * 4 * FACTORS + SMALL,
}


@pytest.fixture(scope="module")
def started():
    plan = jdp.Plan(jdp.make_mesh(data=8), "zero1", min_shard_size=64)
    return plan, jdp.init_state(lesson.init, optax.adam(lesson.RATE), plan, rng=jax.random.key(0))


@pytest.mark.parametrize("name", ["none", "bf16", "int8, weights too", "topk 1 %", "powersgd, rank 4"])
def test_bytes_are_the_formula_s(started, name):
    plan, start = started
    found = lesson.train(plan, lesson.WIRES[name], start, 0)
    assert found.gradients == pytest.approx(GRADIENTS[name], abs=64)  # eight scalars, the loss among them
    weights = PADDED * (1 + 4 / 256) if name == "int8, weights too" else 4 * sum(KERNELS)
    assert found.weights == pytest.approx(SHARE * weights + BIAS, abs=1)
    factors = 4 * 4 * (256 + 10) * (name == "powersgd, rank 4")  # Q of both kernels
    assert found.kept == (4 * sum(KERNELS) + factors if lesson.WIRES[name] else 0)


def test_int8_trains_as_well(started):
    plan, start = started
    losses = [lesson.train(plan, lesson.WIRES[name], start, 20).loss for name in ("none", "int8")]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)  # measured 1e-4 to 9e-4


def test_only_error_feedback_takes_memory():
    kept = {name for name, wire in lesson.WIRES.items() if wire and wire.error_feedback}
    assert {"int8, nothing kept"} == lesson.WIRES.keys() - kept - {"none"}
    for scheme in ("topk", "powersgd"):
        with pytest.raises(ValueError, match="needs error feedback"):
            dataclasses.replace(jdp.Wire(scheme), error_feedback=False)


def test_the_largest_elements_of_each_device():
    x = np.array([[[3.0, -4.0], [1.0, 2.0]], [[0.0, 1.0], [-5.0, 2.0]]])
    np.testing.assert_array_equal(by_hand.largest(x, 0.5), [[[3, -4], [0, 0]], [[0, 0], [-5, 2]]])


def test_what_top_k_drops_is_missed_and_what_it_keeps_is_not():
    whole, kept, dropped = (
        by_hand.topk_by_hand(*given, 20, lesson.RATE) for given in ((1, True), (0.01, True), (0.01, False))
    )
    assert whole < kept < dropped
