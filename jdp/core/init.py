"""The state is born sharded.

1. `jax.eval_shape` runs `init` and `tx.init` without memory and learns the tree.
2. The plan says where every leaf rests.
3. One jitted program with those shardings as its `out_shardings` makes the values: every device computes the shard it
   keeps. JAX's partitionable random numbers make an element's value a function of the key and its index alone, so the
   weights are bitwise the same on any mesh.
"""

from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdp.core import flax_nnx
from jdp.core.agreement import agree, key_fact, processes_of, program_fact
from jdp.core.batch import plan_fact
from jdp.core.notices import notice
from jdp.core.optim.checks import check_optimizer, check_update, first_state
from jdp.core.paths import path_of
from jdp.core.sharding.plan import Plan
from jdp.core.state import Static, TrainState, trained_part
from jdp.core.trainable import resolve
from jdp.core.types import InitFn, PyTree

LINEN_STATE = frozenset(("batch_stats", "cache", "intermediates", "perturbations"))


def init_state(
    init: InitFn, tx: optax.GradientTransformation, plan: Plan, *, rng: jax.Array, wrt: Any = None
) -> TrainState:
    """Make the train state, each leaf where `plan` wants it. No device ever holds what it will not keep.

    Args:
        init: `init(rng)` -> an `nnx.Module`, or a pytree of arrays; those that are trained are floating point.
        tx: any optax optimizer, `optax.MultiSteps` too.
        plan: where things live.
        rng: `jax.random.key(seed)`, the same on every process; everything random in training derives from it.
        wrt: what is trained. None: every parameter; a pattern of paths ("head/*") or a sequence of them, as in
            `Plan.rules`; for an NNX module also any filter of nnx (`nnx.LoRAParam`, a callable). The rest is frozen: no
            gradient, no optimizer state, any dtype; but sharded and gathered as the strategy says. The optimizer
            sees None in place of it.

    Raises:
        ValueError: `tx` is no optimizer or `rng` no key, a trained parameter is not a floating-point array or one of
            linen's other collections, `wrt` does not fit, the optimizer's state cannot be mapped or its update needs
            what a step does not have, or a rule of the plan does not fit; with several processes, also that they differ
            in the plan, the key or what `init` makes of it.
    """
    make, abstract = _prepare(init, tx, rng, wrt)
    notice(str(plan))
    _mention_multi_steps(abstract.opt_state)
    plan.report_replicated(abstract)
    shardings = plan.shardings(abstract)
    made, key = jax.jit(make, out_shardings=_fields(shardings)), _typed(rng)
    if len(processes_of(plan.mesh)) > 1:
        agree("init_state", [plan_fact(plan), key_fact(key, "The key")], plan.mesh)
        agree("init_state", [program_fact(made.lower(key))], plan.mesh)
    return TrainState(**made(key), static=abstract.static)


def abstract_state(
    init: InitFn, tx: optax.GradientTransformation, plan: Plan, *, rng: jax.Array, wrt: Any = None
) -> TrainState:
    """The same state as `init_state` makes, of `jax.ShapeDtypeStruct` leaves with their shardings: no memory is used.

    The plan's devices may be descriptions of devices that this machine does not have.
    """
    _, abstract = _prepare(init, tx, rng, wrt)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        plan.shardings(abstract),
    )


def _prepare(init: InitFn, tx: Any, rng: jax.Array, wrt: Any) -> tuple[Any, TrainState]:
    check_optimizer(tx)
    found: list[Static] = []

    def make(rng: jax.Array) -> dict[str, PyTree]:
        model, specs = flax_nnx.built(init, jax.random.fold_in(rng, 0))
        params, model_state, adapter = flax_nnx.split(model)
        _check_arrays(params)
        trained = resolve(params, adapter, wrt)
        _check_collections(trained_part(params, trained))
        found.append(Static(tx, adapter, specs, trained))
        return {
            "step": jnp.zeros((), jnp.int32),
            "params": params,
            "opt_state": first_state(tx, trained_part(params, trained)),
            "model_state": model_state,
            "rng": jax.random.fold_in(rng, 1),
            "skipped": jnp.zeros((), jnp.int32),
        }

    shapes = jax.eval_shape(make, _typed(rng))
    if found[0].adapter is not None and found[0].adapter.structure.may_differ:
        jax.eval_shape(lambda rng: make(rng), _typed(rng))
        _mention_recompiling(*found)
    check_update(tx, trained_part(shapes["params"], found[0].trained), shapes["opt_state"])
    return make, TrainState(**shapes, static=found[0])


def _mention_recompiling(first: Static, second: Static) -> None:
    """Do two calls of `init` make the same module?"""
    if first.adapter != second.adapter:
        name = first.adapter.structure.difference(second.adapter.structure)
        notice(
            f"every call of init makes another {name or 'structure'} of the model, which cannot be compared with the "
            "one before: each new state compiles the step again; define it once, outside of init"
        )


def _mention_multi_steps(opt_state: PyTree) -> None:
    is_multi = lambda node: isinstance(node, optax.MultiStepsState)  # noqa: E731
    if any(map(is_multi, jax.tree.leaves(opt_state, is_leaf=is_multi))):
        notice(
            "optax.MultiSteps keeps an accumulator between steps, synchronises every one of them, and averages their "
            "means; make_train_step(accumulate=K) takes K microbatches of one batch instead, weighs examples alike, "
            "and synchronises once under ddp and zero1"
        )


def _typed(rng: Any) -> jax.Array:
    """Accept a legacy uint32 key as well."""
    if not hasattr(rng, "dtype"):
        raise ValueError(f"rng is a key, such as jax.random.key(0); got {rng!r}.")
    if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        key = rng
    else:
        try:
            key = jax.random.wrap_key_data(rng)
        except (TypeError, ValueError) as error:
            raise ValueError(f"rng is a key, such as jax.random.key(0); got {rng.dtype}{list(rng.shape)}.") from error
    if key.shape:
        raise ValueError(f"rng is one key, such as jax.random.key(0); got keys of shape {list(key.shape)}. Pass one.")
    return key


def _fields(state: TrainState) -> dict[str, PyTree]:
    names = ("step", "params", "opt_state", "model_state", "rng", "skipped")
    return {name: getattr(state, name) for name in names}


def _check_collections(trained: PyTree) -> None:
    """What linen's `init` returns holds more than parameters."""
    if not isinstance(trained, Mapping) or "params" not in trained:
        return
    for name in LINEN_STATE & cast("Mapping[str, PyTree]", trained).keys():
        if jax.tree.leaves(trained[name]):
            raise ValueError(
                f"`init` returns parameters; it gave linen's variables, whose {name!r} would be trained as parameters. "
                'Return `variables["params"]` alone. If calls change the rest, have flax carry it: '
                "`return nnx.bridge.ToNNX(module, rngs=nnx.Rngs(rng)).lazy_init(x)`; or freeze it, with "
                '`wrt="params/*"`.'
            )


def _check_arrays(params: PyTree) -> None:
    for path, leaf in jax.tree.leaves_with_path(params):
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise ValueError(
                f"`init` returns arrays only; {path_of(path) or 'the tree'} is {leaf!r}. Part the tree and close over "
                "the rest (in equinox: params, static = eqx.partition(model, eqx.is_array))."
            )
