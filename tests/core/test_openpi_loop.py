"""A training loop built as openpi's: linen blocks in an NNX module, weights frozen in bfloat16 by a filter, an average.

The loop as openpi writes it (`nnx.DiffState`, optax, its own average) is run on one device; jdp's has to give the same.
"""

import dataclasses
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdp

WIDTH, LAYERS, ROWS, DECAY = 16, 2, 16, 0.9


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        low = nn.Dense(WIDTH, name="lora_b", use_bias=False)(nn.Dense(2, name="lora_a", use_bias=False)(x))
        return x + jnp.tanh(nn.Dense(WIDTH, dtype=x.dtype)(x) + low), None


class Layers(nn.Module):
    """`nn.scan` makes the weights; `layered` computes with them by `jdp.scan_layers`, as the guide has it."""

    layered: bool = False

    @nn.compact
    def __call__(self, x):
        if self.layered and not self.is_initializing():
            run = Block(parent=None).apply
            layers = self.variables["params"]["layers"]
            return jdp.scan_layers(lambda w, x: run({"params": w}, x)[0], layers, x, remat="full")
        scan = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        return scan(name="layers")(x, None)[0]


class Policy(nnx.Module):
    def __init__(self, rngs, *, layered):
        self.llm = nnx.bridge.ToNNX(Layers(layered)).lazy_init(jnp.ones((1, 3, WIDTH)), rngs=rngs)
        self.time = nnx.Linear(1, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def compute_loss(self, rng, observation, actions):
        noise_rng, time_rng, crop_rng = jax.random.split(rng, 3)
        shifts = jax.vmap(lambda key: jax.random.uniform(key, (WIDTH,)))(jax.random.split(crop_rng, len(actions)))
        noise = jax.random.normal(noise_rng, actions.shape)
        time = jax.random.beta(time_rng, 1.5, 1, (len(actions),))
        x = time[:, None, None] * noise + (1 - time[:, None, None]) * actions
        embedded = jnp.tile(self.time(time[:, None])[:, None], (1, actions.shape[1], 1))
        image = self.llm((observation["image"] + shifts)[:, None])
        return jnp.mean((self.out(self.llm(x + embedded) + image) - (noise - actions)) ** 2, -1)


@dataclasses.dataclass(frozen=True)
class Matches:
    pattern: str

    def __call__(self, path, _):
        return re.fullmatch(self.pattern, "/".join(map(str, path))) is not None


FREEZE = nnx.All(Matches(".*llm.*"), nnx.Not(Matches(".*lora.*")))
TRAINED = nnx.All(nnx.Param, nnx.Not(FREEZE))
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
KEY = jax.random.key(1)


def make(rng, *, layered=False):
    model = Policy(nnx.Rngs(rng), layered=layered)
    graphdef, state = nnx.split(model)
    frozen = set(dict(nnx.to_flat_state(nnx.filter_state(state, FREEZE))))
    halved = lambda path, p: p.replace(p.get_value().astype("bfloat16")) if path in frozen else p  # noqa: E731
    return nnx.merge(graphdef, nnx.map_state(halved, state))


def loss_fn(model, batch, rng):
    observation, actions = batch
    return jnp.mean(model.compute_loss(rng, observation, actions))


def batches(count=3):
    random = np.random.default_rng(0)
    for _ in range(count):
        image = random.normal(size=(ROWS, WIDTH)).astype("float32")
        yield {"image": image}, random.normal(size=(ROWS, 3, WIDTH)).astype("float32")


@pytest.fixture(scope="module")
def as_published():
    """Losses, weights and averages of the loop as openpi writes it, on one device."""
    model = make(jax.random.fold_in(jax.random.key(0), 0))
    graphdef, params = nnx.split(model)
    opt_state, average, losses = TX.init(nnx.filter_state(params, TRAINED)), params, []

    @jax.jit
    def step(params, opt_state, average, number, batch):
        model = nnx.merge(graphdef, params)
        differentiated = nnx.DiffState(0, TRAINED)
        loss, grads = nnx.value_and_grad(loss_fn, argnums=differentiated)(model, batch, jax.random.fold_in(KEY, number))
        updates, opt_state = TX.update(grads, opt_state, nnx.filter_state(params, TRAINED))
        nnx.update(model, optax.apply_updates(nnx.filter_state(params, TRAINED), updates))
        params = nnx.state(model)
        return params, opt_state, jax.tree.map(lambda a, p: DECAY * a + (1 - DECAY) * p, average, params), loss

    for number, batch in enumerate(batches()):
        params, opt_state, average, loss = step(params, opt_state, average, number, batch)
        losses.append(float(loss))
    return losses, nnx.filter_state(params, TRAINED), nnx.filter_state(average, TRAINED)


@pytest.mark.parametrize(("strategy", "layered"), [("zero1", False), ("zero3", True)])
def test_a_port_of_openpis_loop_trains_the_same_model(as_published, strategy, layered):
    losses, params, average = as_published
    plan = jdp.Plan(jdp.make_mesh(data=-1), strategy, min_shard_size=8)
    tx = jdp.with_ema(TX, DECAY)
    state = jdp.init_state(lambda rng: make(rng, layered=layered), tx, plan, rng=jax.random.key(0), wrt=TRAINED)
    state = dataclasses.replace(state, rng=jax.random.key(1))  # donated
    step = jdp.make_train_step(loss_fn, plan, check_loss=False)
    for batch, wanted in zip(batches(), losses, strict=True):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(float(metrics["loss"]), wanted, rtol=2e-5)  # sums run in another order
    assert step.partitioning == "auto"  # a scalar: beta draws for all rows at once
    for found, wanted in ((state, params), (jdp.ema_params(state), average)):
        same = lambda got, own: np.testing.assert_allclose(got, own, atol=2e-4)  # Adam divides by small moments  # noqa: E731
        jax.tree.map(same, nnx.to_pure_dict(nnx.state(found.model, TRAINED)), nnx.to_pure_dict(wanted))
    frozen = state.params["llm"]["layers"]["Dense_0"]["kernel"]
    assert frozen.dtype == "bfloat16" and len(jax.tree.leaves(state.opt_state.average)) == len(jax.tree.leaves(params))
