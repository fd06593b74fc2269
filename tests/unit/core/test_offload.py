"""Optimizer state in host memory: the same bits, in the memory where the plan has them."""

from dataclasses import replace

import jax
import optax
from plain_layers import init_layers, layers_loss, tokens_of
from tiny_states import assert_same_bits
from trainings import plan_of

import jdp
from jdp.core.sharding.host_memory import PINNED


def loss(params, batch, rng):
    return layers_loss(params, batch, jax.random.key(0))  # an evaluation has no key, and without dropout none is used


def made(offload):
    """A state and a step; biases and the scale are too small to leave the devices."""
    plan = replace(plan_of("zero3", 4, min_shard_size=64), offload=offload)
    state = jdp.init_state(init_layers, optax.adamw(1e-2), plan, rng=jax.random.key(0))
    return state, jdp.make_train_step(loss, plan, clip_norm=1.0, check_loss=False)


def kinds(tree) -> dict[str, str]:
    return {jax.tree_util.keystr(path): x.sharding.memory_kind for path, x in jax.tree.leaves_with_path(tree)}


def test_same_bits_through_steps_and_checkpoints(tmp_path):
    """Three steps with and without; saved after two, and restored onto the other plan."""
    (state, step), (off, off_step) = made(None), made("optimizer")
    before = kinds(off)
    first, second, third = (tokens_of(16, seed=seed) for seed in range(3))
    for batch in (first, second):
        state, metrics = step(state, batch)
        off, off_metrics = off_step(off, batch)
        assert float(metrics["loss"]) == float(off_metrics["loss"])
    assert kinds(off) == before and set(kinds(off.params).values()) == {"device"} == {before[".step"]}
    assert all(before[f".opt_state[0].mu['layers']['{name}']"] == PINNED for name in ("up", "down"))
    assert_same_bits(state, off)

    jdp.save(tmp_path / "device", state)
    jdp.save(tmp_path / "host", off)
    onto_host = jdp.restore(tmp_path / "device", off)
    onto_device = jdp.restore(tmp_path / "host", state)
    assert kinds(onto_host) == before and set(kinds(onto_device).values()) == {"device"}
    assert_same_bits(onto_host, onto_device)
    state, metrics = step(onto_device, third)
    off, off_metrics = off_step(onto_host, third)
    assert float(metrics["loss"]) == float(off_metrics["loss"])
    assert_same_bits(state, off)
    evaluate, off_evaluate = (jdp.make_eval_step(loss, of.plan, check_loss=False) for of in (step, off_step))
    assert float(evaluate(state, third)["loss"]) == float(off_evaluate(off, third)["loss"])


def test_plan_says_what_rests_on_the_host():
    state, step = made("optimizer")
    placements = {p.path: p for p in step.plan.placements(state)}
    embed = placements["opt_state/0/mu/embed"]
    assert embed.on_host and embed.reason.endswith("in host memory") and embed.bytes_per_device == 4 * 64 * 32 // 4
    assert placements["params/embed"].memory == placements["opt_state/0/mu/scale"].memory == "device"
    assert str(step.plan).endswith("gathered at each use; optimizer state in host memory")
    assert not any(p.on_host for p in replace(step.plan, offload=None).placements(state))
