"""Make the train state sharded from the start, and report the parameters that are not sharded as the strategy says.

JAX's partitionable random numbers depend on the key and the element's index alone: weights are the same on any mesh.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from jdp.base.errors import UserError, public
from jdp.base.formatting import format_bytes, listed
from jdp.base.notices import notice, warn
from jdp.core import flax_nnx
from jdp.core.init.trees import check_init, check_tree, made_sharded, resolve, typed_key
from jdp.core.plan import Plan, check_plan
from jdp.core.sharding.axes import DATA, REPLICA, factors
from jdp.core.sharding.placement import Placement, axes_of, rest_spec
from jdp.core.state import Static, TrainState, trained_part
from jdp.core.types import InitFn, Model, PyTree
from jdp.core.update.muon import noting_stacks
from jdp.core.update.optimizer import check_optimizer, check_update, first_state, products

REPORTED_SHARE = 0.05
"""Share of a device's part of the state above which the report names a mesh that divides its replicated leaves."""
STEPS = 0x6A6470
"""The number that is folded into a run's key for the keys of its steps; an `init` folds small ones."""
LINEN_STATE = frozenset(("batch_stats", "cache", "intermediates", "perturbations"))


@public()
def init_state(
    init: InitFn[Model], tx: optax.GradientTransformation, plan: Plan, *, rng: jax.Array, wrt: Any = None
) -> TrainState[Model]:
    """Make the train state with every leaf sharded as the plan says. No device ever holds more than its shards.

        >>> state = jdp.init_state(init, optax.adamw(3e-4), plan, rng=jax.random.key(0))
        >>> state.params["kernel"].sharding.spec
        P('data',)

    The weights are those of `init(rng)`, as of `jdp.init`: bitwise the same on any mesh and under any strategy.

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
        model, specs = flax_nnx.built(init, rng)
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
            "rng": jax.random.fold_in(rng, STEPS),
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


def report_placements(plan: Plan, state: TrainState) -> None:
    """Report once axes and parameters that are not used or sharded; under ddp, the rules that name `data`."""
    params = jax.tree.leaves(plan.param_placements(state.params, state.static))
    used = {DATA, REPLICA}.union(axis for p in params for entry in p.compute for axis in axes_of(entry))
    for axis in (axis for axis, size in plan.mesh.shape.items() if size > 1 and axis not in used):
        notice(
            f"no parameter is sharded over {axis}: its devices repeat each other's work, unless the loss divides "
            f"activations over {axis}. Name it in Plan's rules, or leave these devices to data"
        )
    if plan.mesh.shape[DATA] == 1:
        return
    if not plan.row.shard_state:
        for pattern in (pattern for pattern, spec in plan.rules if any(DATA in axes_of(entry) for entry in spec)):
            warn(
                f"the rule for {pattern!r} shards over {DATA}, which {plan.strategy} does not: its parameters are "
                f"replicated over {DATA}. Choose zero1, zero2 or zero3, or leave {DATA} out of the rule"
            )
        return
    replicated = [p for p in params if p.dim is None]
    small = [p for p in replicated if "min_shard_size" in p.reason]
    indivisible = [p for p in replicated if p.is_indivisible]
    if indivisible:
        _report_indivisible(plan, state, indivisible)
    for p in (p for p in replicated if p not in small and p not in indivisible):
        notice(f"{p.path} {list(p.shape)} is {p.reason} ({p.bytes_per_device:,} bytes on every device)")
    if small:
        notice(
            f"parameters of fewer than {plan.min_shard_size} elements stay replicated, "
            f"{sum(p.bytes_per_device for p in small):,} bytes on every device: {listed(p.path for p in small)}"
        )


def _report_indivisible(plan: Plan, state: TrainState, params: Sequence[Placement]) -> None:
    mirrors = {f"mirrors params/{p.path}" for p in params}
    placements = plan.placements(state)
    opt_state = sum(p.bytes_per_device for p in placements if p.reason.partition(";")[0] in mirrors)
    held = opt_state + sum(p.bytes_per_device for p in params)
    share = held / sum(p.bytes_per_device for p in placements)
    mesh = dividing_mesh(plan, params) if share > REPORTED_SHARE else None
    notice(
        f"{_largest(params)}: no dimension divides by {DATA}={plan.mesh.shape[DATA]}, so every device holds all, "
        f"{format_bytes(held)} with optimizer state, {share:.1%} of its state"
        + (f"; a mesh of {mesh} divides all" if mesh else "")
    )


def dividing_mesh(plan: Plan, params: Sequence[Placement]) -> str | None:
    """Return "replica=2 × data=4", the mesh with the longest `data` axis that divides all these parameters."""
    sizes = dict(plan.mesh.shape)
    for data in range(sizes[DATA] // 2, 1, -1):
        others = {**sizes, DATA: data}
        if sizes[DATA] % data == 0 and all(rest_spec(p.shape, p.compute, others, 0)[0] != p.compute for p in params):
            mesh = {REPLICA: sizes.get(REPLICA, 1) * sizes[DATA] // data, DATA: data}
            return factors(mesh | {axis: size for axis, size in sizes.items() if axis not in mesh})
    return None


def _largest(params: Sequence[Placement]) -> str:
    largest_first = sorted(params, key=lambda p: -p.bytes_per_device)
    return listed((f"{p.path} {list(p.shape)}" for p in largest_first), 1)


def report_products(plan: Plan, state: TrainState, sizes: Collection[int], divided: Collection[str]) -> None:
    """Report once sharded parameters whose update takes products of arrays of these `sizes`, except `divided` ones."""
    params = jax.tree.leaves(plan.param_placements(state.params, state.static))
    gathered = [p for p in params if p.dim is not None and math.prod(p.shape) in sizes and p.path not in divided]
    if gathered and plan.mesh.shape[DATA] > 1:
        size = sum(p.bytes_per_device for p in gathered) * plan.mesh.shape[DATA]
        notice(
            f"the optimizer's update takes matrix or inner products of {_largest(gathered)}, {format_bytes(size)} "
            f"that {plan.strategy} shards: XLA gathers them or sums partial products, in addition to the traffic that "
            f"{plan.strategy} promises; jdp.verify counts it"
        )
