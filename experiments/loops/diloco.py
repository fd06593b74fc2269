"""DiLoCo: two islands of devices train separately, and agree on their weights once in H steps.

The one word: `jdp.make_mesh(devices=...)`. Each island has its own mesh, plan and state, and takes ordinary steps,
during which nothing crosses the slow links. Then every device sends its shard of Δ, the distance that its island has
moved:

    Δ = θ - mean of the islands' weights        m ← μ · m + Δ        θ ← θ - η · (Δ + μ · m)

η = 1 and μ = 0 average the weights (local SGD, Stich 2019, arXiv:1805.09767). η = 0.7, μ = 0.9 and AdamW inside are
DiLoCo (Douillard et al. 2023, arXiv:2311.08105).

    python experiments/loops/diloco.py zero2
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from story import tell

import jdp

FEATURES, WIDTH, ROWS, ISLANDS, STEPS = 8, 16, 32, 2, 4  # ROWS of one step of all islands; STEPS is H
TX, RATE, MOMENTUM = optax.adamw(1e-2), 0.7, 0.9


def init(rng):
    first, last = jax.random.split(rng)
    return {"first": jax.random.normal(first, (FEATURES, WIDTH)) / 3, "last": jax.random.normal(last, (WIDTH,)) / 4}


def loss_fn(params, batch, rng):
    error = jnp.tanh(batch["x"] @ params["first"]) @ params["last"] - batch["y"]
    return jdp.Loss(jnp.square(error).sum(), jnp.float32(len(error)))


def rounds(steps):
    """Yield each round's batch, on the host: {"x": [islands, steps, rows of an island's step, features], ...}."""
    random = np.random.default_rng(0)
    for _ in range(steps):
        x = random.normal(size=(ISLANDS, STEPS, ROWS // ISLANDS, FEATURES)).astype("float32")
        yield {"x": x, "y": x.sum(axis=-1)}


def stacked(mesh, *leaves):
    """Return the islands' arrays as one array [islands, ...]; every shard stays on its device."""
    shards = [shard.data[None] for leaf in leaves for shard in leaf.addressable_shards]
    sharding = NamedSharding(mesh, P("replica", *leaves[0].sharding.spec))
    return jax.make_array_from_single_device_arrays((ISLANDS, *leaves[0].shape), sharding, shards)


def on_island(mesh, leaf):
    """Return an island's part of an array that all islands have, copied, because a step donates its state."""
    shards = [shard.data for shard in leaf.addressable_shards if shard.device in mesh.devices]
    sharding = NamedSharding(mesh, leaf.sharding.spec)
    return jnp.copy(jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards))


def train(plan, steps=2):
    """Return each island's loss in the last step of each round, and the weights that the islands agree on."""
    devices, key = np.array(plan.mesh.devices.flat).reshape(ISLANDS, -1), jax.random.key(0)
    everywhere = jdp.make_mesh(devices=list(devices.flat), replica=ISLANDS, data=-1)  # `replica` is the slow links
    islands = [jdp.make_mesh(devices=list(own), data=-1) for own in devices]
    plan, *plans = (jdp.Plan(m, plan.strategy, min_shard_size=plan.min_shard_size) for m in (everywhere, *islands))
    states = [jdp.init_state(init, TX, own, rng=key) for own in plans]
    train_steps = [jdp.make_train_step(loss_fn, own) for own in plans]
    params = jdp.init(init, plan, rng=key)  # θ, the same weights
    momentum = jdp.init(lambda params: jax.tree.map(jnp.zeros_like, params), plan, of=params)

    @jax.jit
    def agree(params, momentum, ends):
        delta = jax.tree.map(lambda p, e: p - e.mean(axis=0), params, ends)
        momentum = jax.tree.map(lambda m, d: MOMENTUM * m + d, momentum, delta)
        params = jax.tree.map(lambda p, d, m: p - RATE * (d + MOMENTUM * m), params, delta, momentum)
        return jdp.place((params, momentum), plan)

    measured = []
    for batch in rounds(steps):
        losses = []
        for i, train_step in enumerate(train_steps):  # islands overlap: a call returns before its step is done
            for h in range(STEPS):
                states[i], metrics = train_step(states[i], jax.tree.map(lambda x, i=i, h=h: x[i, h], batch))
            losses.append(metrics["loss"])
        ends = jax.tree.map(functools.partial(stacked, everywhere), *(state.params for state in states))
        params, momentum = agree(params, momentum, ends)
        for i, island in enumerate(islands):
            own = jax.tree.map(functools.partial(on_island, island), params)
            states[i] = replace(states[i], params=own)
        measured.append(np.array(losses))
    return measured, params


if __name__ == "__main__":
    tell(train)
