"""flax.linen and equinox: any tree of arrays trains as on one device, and nothing of jdp knows them.

The programs are small MLPs on uneven weights. Bounds: float32 sums in another order part by 1e-7 of their terms, and
Adam with eps = 1e-4 keeps that small where a gradient nearly vanishes.
"""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from trainings import assert_close, plan_of
from trainings import train as train_on

import jdp

ROWS, FEATURES, CLASSES = 16, 8, 4
TX = optax.adamw(1e-2, eps=1e-4)


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        x = nn.relu(nn.Dense(32)(x))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(CLASSES)(x)


linen = LinenMLP()


def init_linen(rng):
    return linen.init(rng, jnp.zeros((1, FEATURES)), train=False)["params"]


def apply_linen(params, x, rng):
    train = rng is not None
    return linen.apply({"params": params}, x, train=train, rngs={"dropout": rng} if train else None)


class EquinoxMLP(eqx.Module):
    layers: list
    rate: eqx.nn.Dropout

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.layers = [eqx.nn.Linear(FEATURES, 32, key=first), jax.nn.relu, eqx.nn.Linear(32, CLASSES, key=second)]
        self.rate = eqx.nn.Dropout(0.2)

    def __call__(self, x, key):
        first, act, second = self.layers
        return second(self.rate(act(first(x)), key=key, inference=key is None))


def init_equinox(rng):
    return eqx.filter(EquinoxMLP(rng), eqx.is_array)


static = eqx.filter(EquinoxMLP(jax.random.key(0)), eqx.is_array, inverse=True)


def apply_equinox(params, x, rng):
    """A key an example, by `split`: jdp gives each the key it has on one device, whatever shard it is on."""
    model = eqx.combine(params, static)
    if rng is None:
        return jax.vmap(lambda row: model(row, None))(x)
    return jax.vmap(model)(x, jax.random.split(rng, len(x)))


FRAMEWORKS = {"linen": (init_linen, apply_linen), "equinox": (init_equinox, apply_equinox)}


def batches():
    random = np.random.default_rng(0)
    for _ in range(3):
        x, y = random.normal(size=(ROWS, FEATURES)).astype(np.float32), random.integers(0, CLASSES, ROWS)
        weight = np.where(random.random(ROWS) < 0.25, 0, random.random(ROWS)).astype(np.float32)
        yield {"x": x, "y": y, "weight": weight}


@functools.cache
def train(name, strategy, partitioning, devices=8, accumulate=2):
    """The parameters in the end, the losses, and the state."""
    init, apply = FRAMEWORKS[name]

    def loss_fn(params, batch, rng):
        nll = optax.softmax_cross_entropy_with_integer_labels(apply(params, batch["x"], rng), batch["y"])
        return jdp.Loss((nll * batch["weight"]).sum(), batch["weight"].sum())

    plan, settings = plan_of(strategy, devices, min_shard_size=64), {"partitioning": partitioning}
    _, state, measured = train_on(loss_fn, init, TX, plan, batches(), accumulate=accumulate, **settings)
    measured.append(jdp.make_eval_step(loss_fn, plan, check_loss=False)(state, next(batches())))
    return jax.device_get(state.params), [float(metrics["loss"]) for metrics in measured], state


assert_same = functools.partial(assert_close, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_any_pytree_trains_as_on_one_device(name):
    """Linen draws for all rows at once, equinox by a key for each row."""
    params, losses, state = train(name, "zero1", "manual")
    wanted, alone, _ = train(name, "ddp", "auto", devices=1, accumulate=1)
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    assert_same(params, wanted)
    assert jax.tree.structure(state.model) == jax.tree.structure(wanted)
    assert any("data" in leaf.sharding.spec for leaf in jax.tree.leaves(state.opt_state))


# A linen module that keeps statistics: flax's own bridge makes it an NNX module.


class LinenNormed(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        for width in (32, 24):
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(width)(x))
        return nn.Dense(CLASSES)(nn.relu(x))


def bridged(rng):
    return nnx.bridge.ToNNX(LinenNormed(), rngs=nnx.Rngs(rng)).lazy_init(jnp.zeros((1, FEATURES)), train=False)


def bridged_loss(model, batch, rng):
    train = rng is not None
    logits = model(batch["x"], train=train, mutable=["batch_stats"] if train else False)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return jdp.Loss(nll.sum(), jnp.float32(ROWS))


def test_a_bridged_linen_module_keeps_statistics():
    ends = []
    for plan in (plan_of("zero1", min_shard_size=64), plan_of("ddp", 1)):
        _, state, measured = train_on(bridged_loss, bridged, TX, plan, batches())
        ends.append(jax.device_get((state.params, state.model_state, measured[-1]["loss"])))
    assert_same(*ends)
    assert [norm["mean"].shape for norm in ends[0][1].values()] == [(32,), (24,)]
