"""HSDP, replica=2 × data=4: where the state lies, what travels, and that training equals one device's.

The bounds are test_equivalence's: float32 sums in another order, through AdamW with eps = 1e-6.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from judged import judged
from plain_layers import init_layers, layers_loss, tokens_of

import jdp
from jdp.foresight.targets.resolve import target
from jdp.models import GPTConfig, build, next_token_loss

ROWS, LENGTH, STEPS = 16, 8, 4
LOSS_BOUND, WEIGHT_BOUND = 5e-6, 3e-5
WIDE = GPTConfig(vocab_size=512, context=64, layers=4, width=256, heads=4, tied=True, remat="full")
init = functools.partial(init_layers, layers=2)
loss = functools.partial(layers_loss, dropout=0.1)
CASES = [
    ("ddp", "manual", 2),
    ("zero1", "auto", 1),
    ("zero2", "manual", 1),
    ("zero3", "manual", 2),
]
REST = [(s, p, k) for s in ("ddp", "zero1", "zero2", "zero3") for p in ("auto", "manual") for k in (1, 2)]


def make_batches():
    """A row in four has weight zero, as padding has."""
    random = np.random.default_rng(0)
    for step in range(STEPS):
        weight = random.random((ROWS, LENGTH))
        weight[random.random(ROWS) < 0.25] = 0
        yield {**tokens_of(ROWS, LENGTH, seed=step), "weights": weight.astype(np.float32)}


@functools.cache
def start(strategy):
    """The initial state, made once for all that lay it the same way: a step takes its memory."""
    if strategy in ("zero1", "zero2"):
        return start("zero3")
    plan = jdp.Plan(jdp.make_mesh(data=4, replica=2), strategy, min_shard_size=64)
    return jdp.init_state(init, optax.adamw(3e-3, eps=1e-6), plan, rng=jax.random.key(7))


def train(plan, state, partitioning, accumulate):
    state = jax.tree.map(jnp.copy, state)
    step = jdp.make_train_step(loss, plan, accumulate=accumulate, partitioning=partitioning, clip_norm=1.0)
    losses = []
    for batch in make_batches():
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return np.array(losses), state


@functools.cache
def reference():
    plan = jdp.Plan(jdp.make_mesh(devices=jax.devices()[:1]))
    losses, state = train(plan, jax.device_put(start("ddp"), jax.devices()[0]), "auto", 1)
    return losses, jax.device_get(state.params)


def equals_one_device(losses, state):
    expected_losses, expected = reference()
    assert np.abs(losses - expected_losses).max() <= LOSS_BOUND
    got = jax.device_get(state.params)
    for (path, leaf), want in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        assert np.abs(leaf - want).max() <= WEIGHT_BOUND, jax.tree_util.keystr(path)


def cases(quick, every):
    """Those that run always, and the rest, which are slow."""
    return [*quick, *(pytest.param(*case, marks=pytest.mark.slow) for case in every if case not in quick)]


@pytest.mark.parametrize(("strategy", "partitioning", "accumulate"), cases(CASES, REST))
def test_equals_one_device(strategy, partitioning, accumulate):
    """`replica` is written last, and is the slowest all the same."""
    plan = jdp.Plan(jdp.make_mesh(data=4, replica=2), strategy, min_shard_size=64)
    losses, state = train(plan, start(strategy), partitioning, accumulate)
    equals_one_device(losses, state)
    kernel = state.params["layers"]["up"]  # [2, 32, 64]
    whole = strategy == "ddp"
    pieces = 1 if whole else 4
    assert all(shard.data.size * pieces == kernel.size for shard in kernel.addressable_shards)
    if not whole:  # both replicas hold the same pieces
        held = {shard.device.id: shard.index for shard in kernel.addressable_shards}
        assert all(held[i] == held[i + 4] for i in range(4))
        assert len({str(held[i]) for i in range(4)}) == 4


def test_the_state_is_sharded_over_data_only():
    plan = jdp.Plan(jdp.make_mesh(replica=2, data=4), "zero3", min_shard_size=64)
    state = jdp.abstract_state(init, optax.adamw(1e-3), plan, rng=jax.random.key(0))
    named = {axis for place in plan.placements(state) for entry in place.rest for axis in (entry,) if axis}
    assert named == {"data"}
    assert plan.batch_spec == P(("replica", "data"))


# What travels: the program for 64 H100 in 8 hosts, one replica a host.


def gpt_loss(model, batch, rng):
    return jdp.Loss(*next_token_loss(model(batch["tokens"], rng=rng), batch["targets"], batch["weights"]))


MODELS = {
    "GPT": (lambda rng: build(WIDE, rngs=nnx.Rngs(rng)), gpt_loss),
    "layers": (
        functools.partial(init_layers, layers=4, width=256, hidden=1024, vocabulary=512),
        functools.partial(layers_loss, remat="full"),
    ),
}


@functools.cache
def verified(strategy, accumulate, model="layers"):
    plan = jdp.Plan(jdp.make_mesh(devices=target("h100:8x8").devices, replica=8, data=8), strategy)
    init, loss = MODELS[model]
    state = jdp.abstract_state(init, optax.sgd(1e-3), plan, rng=jax.random.key(0))
    batch = tokens_of(64 * accumulate * 2, 64)
    quick = {"xla_gpu_enable_triton_gemm": False}  # and SGD: what is sent depends on neither
    step = jdp.make_train_step(loss, plan, accumulate=accumulate, precision="bf16", compiler=quick)
    return judged(step, state, batch)


PROGRAMS = [(s, k, "GPT") for s in ("ddp", "zero1", "zero2", "zero3") for k in (1, 4)]


@pytest.mark.parametrize(("strategy", "accumulate", "model"), cases([("zero3", 1, "layers")], PROGRAMS))
def test_keeps_the_contract_on_a_real_target(strategy, accumulate, model):
    report = verified(strategy, accumulate, model)
    assert report.kept, str(report)
    assert 0.98 <= report.ratio <= 1.02 or (strategy == "zero3" and report.ratio <= 1.02)
    assert report.model_axes == ()


def test_only_shards_of_gradients_cross_the_hosts():
    """Over `replica`, the slow links: one all-reduce a step of a shard of the gradients, whatever K is; no gathers."""
    report = verified("zero1", 4)
    across = [s for s in report.collectives if "replica" in s.axes and s.collective.payload_bytes > 8192]
    assert {s.collective.kind for s in across} == {"all-reduce"}
    assert {s.axes for s in across} == {("replica",)}
    sent = sum(s.collective.payload_bytes * s.collective.count for s in across)
    assert sent == pytest.approx(4 * report.theory.parameters / 8, rel=0.01)
    assert not any(s.in_accumulation_loop for s in across)
