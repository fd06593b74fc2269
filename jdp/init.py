"""The state is born sharded.

1. `jax.eval_shape` runs `init` and `tx.init` without memory and learns the tree.
2. The plan says where every leaf rests.
3. One jitted program with those shardings as its `out_shardings` makes the values: every device computes the shard it
   keeps. JAX's partitionable random numbers make an element's value a function of the key and its index alone, so the
   weights are bitwise the same on any mesh.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdp import flax_nnx
from jdp.notices import notice
from jdp.plan import Plan, path_of
from jdp.state import Static, TrainState
from jdp.types import InitFn, PyTree


def init_state(init: InitFn, tx: optax.GradientTransformation, plan: Plan, *, rng: jax.Array) -> TrainState:
    """Make the train state, each leaf where `plan` wants it. No device ever holds what it will not keep.

    Args:
        init: `init(rng)` -> an `nnx.Module`, or a pytree of floating-point arrays.
        tx: any optax optimizer.
        plan: where things live.
        rng: `jax.random.key(seed)`, the same on every process; everything random in training derives from it.

    Raises:
        ValueError: a parameter is not a floating-point array, or a rule of the plan does not fit.
    """
    make, abstract = _prepare(init, tx, plan, rng)
    notice(str(plan))
    plan.report_replicated(abstract)
    shardings = plan.shardings(abstract)
    arrays = jax.jit(make, out_shardings=_fields(shardings))(_typed(rng))
    return TrainState(**arrays, static=abstract.static)


def abstract_state(init: InitFn, tx: optax.GradientTransformation, plan: Plan, *, rng: jax.Array) -> TrainState:
    """The same state as `init_state` makes, of `jax.ShapeDtypeStruct` leaves with their shardings: no memory is used.

    The plan's devices may be descriptions of devices that this machine does not have.
    """
    _, abstract = _prepare(init, tx, plan, rng)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        plan.shardings(abstract),
    )


def _prepare(init: InitFn, tx: optax.GradientTransformation, plan: Plan, rng: jax.Array) -> tuple[Any, TrainState]:
    adapters: list[Any] = []

    def make(rng: jax.Array) -> dict[str, PyTree]:
        params, model_state, adapter = flax_nnx.split(init(jax.random.fold_in(rng, 0)))
        adapters.append(adapter)
        return {
            "step": jnp.zeros((), jnp.int32),
            "params": params,
            "opt_state": tx.init(params),
            "model_state": model_state,
            "rng": jax.random.fold_in(rng, 1),
            "skipped": jnp.zeros((), jnp.int32),
        }

    shapes = jax.eval_shape(make, _typed(rng))
    _check_params(shapes["params"])
    return make, TrainState(**shapes, static=Static(tx, adapters[0]))


def _typed(rng: Any) -> jax.Array:
    """Accept a legacy uint32 key as well."""
    if not hasattr(rng, "dtype"):
        raise ValueError(f"rng is a key, such as jax.random.key(0); got {rng!r}.")
    return rng if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(rng)


def _fields(state: TrainState) -> dict[str, PyTree]:
    names = ("step", "params", "opt_state", "model_state", "rng", "skipped")
    return {name: getattr(state, name) for name in names}


def _check_params(params: PyTree) -> None:
    leaves = jax.tree.leaves_with_path(params)
    if not leaves:
        raise ValueError("`init` must return a module or pytree with parameters; it returned none.")
    for path, leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"Every parameter must be floating point, since it is trained; {path_of(path)} is {leaf.dtype}. "
                "Keep counters and tables out of what `init` returns (in NNX: a variable that is not an nnx.Param)."
            )
