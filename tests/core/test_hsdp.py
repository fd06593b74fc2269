"""HSDP, replica=2 × data=4: where the state lies, and what travels. Training: test_training_properties.py."""

import functools

import jax
import optax
import pytest
from jax.sharding import PartitionSpec as P
from judged import judged
from plain_layers import init_layers, layers_loss, tokens_of

import jdp
from jdp.foresight.targets.resolve import target


def test_the_state_is_sharded_over_data_only():
    plan = jdp.Plan(jdp.make_mesh(replica=2, data=4), "zero3", min_shard_size=64)
    init = functools.partial(init_layers, layers=2)
    state = jdp.abstract_state(init, optax.adamw(1e-3), plan, rng=jax.random.key(0))
    named = {axis for place in plan.placements(state) for entry in place.rest for axis in (entry,) if axis}
    assert named == {"data"}
    assert plan.batch_spec == P(("replica", "data"))


def test_only_shards_of_gradients_cross_the_hosts():
    """For 64 H100 in 8 hosts, one replica a host. Over `replica`, the slow links: one all-reduce a step of a shard
    of the gradients, whatever K is; no gathers."""
    plan = jdp.Plan(jdp.make_mesh(devices=target("h100:8x8").devices, replica=8, data=8), "zero1")
    init = functools.partial(init_layers, layers=4, width=256, hidden=1024, vocabulary=512)
    state = jdp.abstract_state(init, optax.sgd(1e-3), plan, rng=jax.random.key(0))
    quick = {"xla_gpu_enable_triton_gemm": False}  # and SGD: what is sent depends on neither
    loss = functools.partial(layers_loss, remat="full")
    step = jdp.make_train_step(loss, plan, accumulate=4, precision="bf16", compiler=quick)
    report = judged(step, state, tokens_of(512, 64))
    assert report.kept, str(report)
    assert report.model_axes == ()
    across = [s for s in report.collectives if "replica" in s.axes and s.collective.payload_bytes > 8192]
    assert {s.collective.kind for s in across} == {"all-reduce"}
    assert {s.axes for s in across} == {("replica",)}
    sent = sum(s.collective.payload_bytes * s.collective.count for s in across)
    assert sent == pytest.approx(4 * report.theory.parameters / 8, rel=0.01)
    assert not any(s.in_accumulation_loop for s in across)
