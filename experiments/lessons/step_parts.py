"""A data-parallel step of an MLP, and its parts as separate programs, for the lessons that time them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import P

import jdp

TX, DATA = optax.adamw(1e-3), P("data")


def init(key: jax.Array, layers: int = 4, width: int = 512) -> list[jax.Array]:
    return [jax.random.normal(key, (width, width)) * width**-0.5 for _ in range(layers)]


def total_loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for kernel in params:
        x = jnp.tanh(x @ kernel)
    return (x**2).sum()


def loss(params: list[jax.Array], batch: dict[str, jax.Array], rng: jax.Array) -> jdp.Loss:
    return jdp.Loss(total_loss(params, batch["x"]), jnp.float32(len(batch["x"])))


def update(grads: list, opt_state: optax.OptState, params: list) -> tuple:
    """As jdp's step does: the gradients' norm, AdamW, and the old state if the norm is not finite."""
    norm = optax.tree.norm(grads)
    updates, moments = TX.update(grads, opt_state, params)
    new = optax.apply_updates(params, updates), moments
    return norm, jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(norm), new, old), new, (params, opt_state))


def programs(mesh: jax.sharding.Mesh, state: jdp.TrainState, x: jax.Array) -> dict:
    """Return the parts of a step: (program, its arguments), which earlier parts left on the devices."""

    def everywhere(function, specs, result=DATA):
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=result, check_vma=False))

    add, cut = (functools.partial(jax.tree.map, each) for each in (lambda leaf: leaf[None], lambda leaf: leaf[0]))
    mean = functools.partial(jax.tree.map, lambda total: total / len(x))
    # [...] -> [1, ...]: a device's own. The forward pass keeps what the backward pass needs: jax.vjp's function.
    forward = everywhere(lambda params, x: add(jax.vjp(total_loss, params, x)), (P(), DATA))
    backward = everywhere(lambda kept: add(cut(kept)(jnp.float32(1))[0]), (DATA,))
    sync = everywhere(lambda grads: mean(jax.lax.psum(cut(grads), "data")), (DATA,), P())
    kept = forward(state.params, x)[1]
    grads = backward(kept)
    return {
        "forward": (forward, (state.params, x)),
        "backward": (backward, (kept,)),
        "sync": (sync, (grads,)),
        "update": (everywhere(update, (P(), P(), P()), P()), (sync(grads), state.opt_state, state.params)),
    }


@functools.cache
def step_and_state(**size: int) -> tuple[jdp.Step, jdp.TrainState]:
    plan = jdp.Plan(jdp.make_mesh(data=-1), "ddp")
    state = jdp.init_state(lambda key: init(key, **size), TX, plan, rng=jax.random.key(0))
    return jdp.make_train_step(loss, plan, donate=False, partitioning="manual"), state


def setup(rows: int, **size: int) -> tuple[jdp.Step, jdp.TrainState, dict[str, jax.Array]]:
    """Return jdp's step, a state and a batch of `rows` rows per device."""
    step, state = step_and_state(**size)
    x = np.ones((rows * step.plan.mesh.size, len(state.params[0])), np.float32)
    return step, state, jax.device_put({"x": x}, step.plan.batch_sharding)
