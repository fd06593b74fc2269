"""Make the train state sharded from the start, by one jitted program: every device computes the shard that it keeps.

JAX's partitionable random numbers depend on the key and the element's index alone, so the weights are bitwise the same
on any mesh.
"""

from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from jdp.base.errors import UserError
from jdp.base.notices import notice
from jdp.base.public import public
from jdp.core import flax_nnx
from jdp.core.init.sharding_report import report_placements, report_products
from jdp.core.init.trees import check_init, check_tree, key_of_init, made_sharded, resolve, typed_key
from jdp.core.plan import Plan, check_plan
from jdp.core.state import Static, TrainState, trained_part
from jdp.core.types import InitFn, Model, PyTree
from jdp.core.update.muon import noting_stacks
from jdp.core.update.optimizer_checks import check_optimizer, check_update, first_state, products

LINEN_STATE = frozenset(("batch_stats", "cache", "intermediates", "perturbations"))


@public()
def init_state(
    init: InitFn[Model], tx: optax.GradientTransformation, plan: Plan, *, rng: jax.Array, wrt: Any = None
) -> TrainState[Model]:
    """Make the train state with every leaf sharded as the plan says. No device ever holds more than its shards.

        >>> state = jdp.init_state(init, optax.adamw(3e-4), plan, rng=jax.random.key(0))
        >>> state.params["kernel"].sharding.spec
        P('data',)

    The weights are those of `init(jax.random.fold_in(rng, 0))`, as of `jdp.init`: one seed makes one model. They are
    bitwise the same on any mesh and under any strategy.

    Args:
        init: `init(rng)` -> an `nnx.Module`, or a pytree of arrays (flax.linen's `variables["params"]`, an equinox
            module's arrays, dicts). Called under `jit`; its arrays are global.
        tx: any optax optimizer, `optax.MultiSteps` too.
        plan: the mesh, the strategy and the rules by which leaves are sharded.
        rng: one key, `jax.random.key(seed)`, the same on every process; everything random in training derives from it.
        wrt: which parameters are trained; None: all. Give it to fine-tune a part of a model. A path pattern ("head/*",
            as in `Plan.rules`) or a sequence of them; for an NNX module also any filter of nnx (`nnx.LoRAParam`, a
            callable), for variables of other types too. All others are frozen: no gradient, no optimizer state, any
            dtype. They are sharded and gathered as the strategy says, and the optimizer sees None in their place.

    Returns:
        A `TrainState` at step 0 on the plan's devices.

    Raises:
        ValueError: `tx` is no optimizer, `rng` no key, or `init` no function of one. `init` returns something that is
            no array, or a trained parameter that is not floating point or belongs to another collection of linen. `wrt`
            matches nothing. The optimizer's state holds something that is no array or changes shape, or its update
            needs arguments that a step does not have. A rule of the plan matches nothing or does not divide. Processes
            differ in the plan, the key or the program of `init`.
        RuntimeError: another process did not come to this call.
    """
    check_plan(plan, "jdp.init_state(init, tx, plan, rng=...)", init, tx)
    rng = typed_key(rng)
    make, abstract = _prepare(init, tx, plan, rng, wrt)
    notice(str(plan))
    report_placements(plan, abstract)
    shardings = plan.shardings(abstract)
    out_shardings = {name: value for name, value in vars(shardings).items() if name != "static"}
    return TrainState(**made_sharded(make, rng, out_shardings, plan, "init_state"), static=abstract.static)


@public()
def abstract_state(
    init: InitFn[Model], tx: optax.GradientTransformation, plan: Plan, *, rng: jax.Array, wrt: Any = None
) -> TrainState[Model]:
    """Return the shapes, dtypes and shardings of the state that `init_state` would make, without using memory.

        >>> shapes = jdp.abstract_state(init, optax.adamw(3e-4), plan, rng=jax.random.key(0))
        >>> shapes.params["kernel"].shape, shapes.params["kernel"].sharding.spec
        ((64, 32), P('data',))

    It is a target for `jdp.restore`, and an argument for `jdp.foresee` and `jdp.verify`.

    Args:
        init, tx, rng, wrt: as for `init_state`; `init` is traced, not run.
        plan: the mesh, the strategy and the rules; its devices may be described devices that this machine does not
            have.

    Returns:
        A `TrainState` whose leaves are `jax.ShapeDtypeStruct` with global shapes and shardings.

    Raises:
        ValueError: an argument does not fit, for the reasons that `init_state` lists.
    """
    check_plan(plan, "jdp.abstract_state(init, tx, plan, rng=...)", init, tx)
    _, abstract = _prepare(init, tx, plan, typed_key(rng), wrt)
    described = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # noqa: E731
    return jax.tree.map(described, abstract, plan.shardings(abstract))


def _prepare(init: InitFn, tx: Any, plan: Plan, rng: jax.Array, wrt: Any) -> tuple[Any, TrainState]:
    """Return a function that makes the fields of the state, and the abstract state."""
    check_init(init)
    check_optimizer(tx)
    statics: list[Static] = []

    def make(rng: jax.Array) -> dict[str, PyTree]:
        model, specs = flax_nnx.built(init, key_of_init(rng))
        params, model_state, adapter = flax_nnx.split(model, wrt)
        check_tree(params, arrays=True)
        # jnp.full(8, 0.1) has a weak type, for which a step would be compiled twice
        strong = lambda x: x.astype(x.dtype) if getattr(x, "weak_type", False) else x  # noqa: E731
        params, model_state = jax.tree.map(strong, (params, model_state))
        trained = resolve(params, adapter, wrt)
        _check_collections(trained_part(params, trained))
        statics.append(Static(tx, adapter, specs, trained))
        return {
            "step": jnp.zeros((), jnp.int32),
            "params": params,
            "opt_state": first_state(tx, trained_part(params, trained)),
            "model_state": model_state,
            "rng": jax.random.fold_in(rng, 1),
            "skipped": jnp.zeros((), jnp.int32),
        }

    shapes = jax.eval_shape(make, rng)
    abstract = TrainState(**shapes, static=statics[0])
    with noting_stacks() as stacks:
        program = check_update(tx, trained_part(abstract.params, abstract.static.trained), abstract.opt_state)
    report_products(plan, abstract, products(program), {path for stack in stacks for path in stack.paths})
    return make, abstract


def _check_collections(trained: PyTree) -> None:
    """Refuse linen's variables if collections other than the parameters would be trained."""
    if not isinstance(trained, Mapping) or "params" not in trained:
        return
    for name in LINEN_STATE & cast("Mapping[str, PyTree]", trained).keys():
        if jax.tree.leaves(trained[name]):
            raise UserError(
                f"`init` returns parameters; given linen's variables, whose {name!r} would be trained as parameters. "
                'Return variables["params"], freeze the others (wrt="params/*"), or, if calls change them, return '
                "nnx.bridge.ToNNX(module, rngs=nnx.Rngs(rng)).lazy_init(x)."
            )
