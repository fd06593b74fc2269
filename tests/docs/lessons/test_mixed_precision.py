"""Bytes of each setting, what float16 loses and bfloat16 does not, and the factor that a loop finds."""

import jax
import jax.numpy as jnp
import pytest
from load import load

import jdp

lesson = load("mixed_precision")


@pytest.mark.parametrize(
    ("name", "expected"), [("fp32", (4, 8, 4, 4)), ("bf16", (4, 8, 4, 2)), ("bf16, master weights too", (2, 4, 2, 2))]
)
def test_bytes_a_parameter(name, expected):
    plan = jdp.Plan(jdp.make_mesh(data=8), "ddp")
    assert lesson.bytes_a_parameter(name, plan) == pytest.approx(expected, abs=0.01)  # Adam counts its steps, too


@pytest.mark.rest
def test_only_float16_loses_small_and_large_gradients():
    params = lesson.train("f4", steps=200)[0]
    small, fits, large = (lesson.lost(params, "f2", scale) for scale in (2.0**-16, 2.0**8, 2.0**28))
    assert small[0] > 0.5 and fits[0] < 0.01 and fits[1] == 0 and large[1] > 0.001
    assert [lesson.lost(params, jnp.bfloat16, scale) for scale in (2.0**-16, 2.0**28)] == [(0, 0)] * 2


def test_the_loop_skips_overflowing_steps():
    params, (_, scales, finite) = lesson.train("f2", 2.0**28, True, steps=40)
    assert not finite[0] and finite[-1] and scales[-1] < 2.0**28
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))


def test_small_updates_of_bfloat16_weights_round_away():
    learnt = []
    for dtype in ("f4", "bfloat16"):
        losses = lesson.train(jnp.bfloat16, kept=dtype, rate=lesson.SMALL, steps=200)[1][0]
        learnt.append(float(losses[0] - losses[-4:].mean()))
    assert learnt[1] < 0.8 * learnt[0]
