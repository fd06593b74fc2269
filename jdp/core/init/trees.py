"""Make or move the trees of a custom loop, sharded as a plan says; resolve keys and `wrt`.

Parameters (of a pytree, all its arrays) get their rest specs; other variables of a module are replicated. With `of`, a
tree belongs to parameters, as an optimizer's state does, and each leaf is sharded like its parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jdp.base.errors import UserError, public
from jdp.base.formatting import listed
from jdp.base.toml import cut, described
from jdp.base.tree_paths import check_keys, matches, path_of
from jdp.core import flax_nnx
from jdp.core.batch import owned, plan_fact
from jdp.core.cluster.agreement import agree, key_fact, processes_of, program_fact
from jdp.core.plan import Plan, check_plan
from jdp.core.state import TrainState
from jdp.core.types import PyTree
from jdp.core.update.optimizer import is_optimizer

Tree = TypeVar("Tree")


@public()
def init(init: Callable[[Any], Tree], plan: Plan, *, rng: jax.Array | None = None, of: Any = None) -> Tree:
    """Make a tree with every leaf sharded as the plan says. No device ever holds more than its shards.

        >>> model = jdp.init(init, plan, rng=jax.random.key(0))  # an NNX module; of arrays: a pytree
        >>> params, tx = {"w": model.kernel[...]}, optax.adam(1e-3)
        >>> opt_state = jdp.init(tx.init, plan, of=params)
        >>> opt_state[0].mu["w"].sharding.spec
        P('data',)

    The values are bit for bit those of `jax.jit(init)(rng)` on one device, and of `jdp.init_state`.

    Args:
        init: `init(rng)` -> an `nnx.Module` or a pytree of arrays; with `of`, `init(of)` -> what belongs to it. Traced
            under `jit`; its arrays are global.
        plan: the mesh, the strategy and the rules. A rule need not match: it may be for another tree.
        rng: one key, the same on every process. Give it for a model.
        of: the parameters that the tree belongs to: a module (`init` gets its `nnx.Param` state) or a pytree. Give it
            for an optimizer's state, or for another tree like the parameters, such as an average.

    Returns:
        The tree that `init` returned, on the plan's devices.

    Raises:
        ValueError: neither `rng` nor `of` is given, or both; or `rng` is no key. A rule or the metadata shards a
            dimension that does not divide. `init` returns something that is no array, modules inside of a pytree, or an
            `nnx.Optimizer` without `of`. Processes differ in plan, key or program.
        RuntimeError: another process did not come to this call.
    """
    check_plan(plan, "jdp.init(init, plan, rng=...)", init)
    check_init(init, of=of is not None)
    if (rng is None) == (of is None):
        given = "neither" if rng is None else "both"
        raise UserError(
            f"jdp.init takes either rng, for a model, or of, for an optimizer's state; given {given}. Write "
            "jdp.init(init, plan, rng=jax.random.key(0)), or jdp.init(tx.init, plan, of=params)."
        )
    traces: list[tuple[Any, Any]] = []  # (function leaves -> tree, specs of its metadata)

    def make(argument: Any) -> PyTree:
        model, specs = flax_nnx.built(init, argument)
        check_tree(model, of)
        tree, rebuild = flax_nnx.opened(model)
        traces.append((rebuild, specs))
        return tree

    argument = flax_nnx.parameters(of) if rng is None else typed_key(rng)
    shapes = jax.eval_shape(make, argument)
    rebuild, specs = traces[-1]
    shardings = _shardings(shapes, plan, specs, of)
    if of is not None:
        return rebuild(jax.jit(make, out_shardings=shardings)(argument))
    return rebuild(made_sharded(make, argument, shardings, plan, "jdp.init"))


def made_sharded(make: Callable[[Any], PyTree], key: jax.Array, shardings: PyTree, plan: Plan, caller: str) -> PyTree:
    """Run `make(key)` as a program whose results have these shardings, after all processes agree on it."""
    program = jax.jit(make, out_shardings=shardings)
    if len(processes_of(plan.mesh)) > 1:
        agree(caller, [plan_fact(plan), key_fact(key, "The key")], plan.mesh)
        agree(caller, [program_fact(program.lower(key))], plan.mesh)
    return program(key)


@public()
def place(tree: Any, plan: Plan, *, of: Any = None) -> Any:
    """Shard a tree as the plan says: arrays are moved, or inside of a jitted function constrained.

        >>> weights = {"w": np.ones((64, 32), "float32")}  # made elsewhere
        >>> jdp.place(weights, plan)["w"].sharding.spec
        P('data',)

    Args:
        tree: an NNX module, an `nnx.Optimizer`, a `TrainState`, or any pytree of arrays (NumPy's too); with several
            processes, the same values on each. Modules that share a part keep it shared in one `nnx.Dict`.
        plan: the mesh, the strategy and the rules. A rule need not match: it may be for another tree.
        of: the parameters that the tree belongs to, a module or a pytree. Needed for an optimizer or its state.

    Returns:
        The same values on the plan's devices. The tree that was given does not change. An array that already has its
        sharding is returned itself, as by `jax.device_put`: a step that donates the result deletes it in both trees.

    Raises:
        ValueError: a rule or the metadata shards a dimension that does not divide. The tree holds something that is no
            array, integers too large for JAX, or modules inside of a pytree, or is an `nnx.Optimizer` and `of` is None.
    """
    check_plan(plan, "jdp.place(tree, plan)", tree)
    if isinstance(tree, TrainState):
        return _put(tree, plan.shardings(tree))
    check_tree(tree, of)
    opened, rebuild = flax_nnx.opened(tree)
    opened = jax.tree.map(lambda x: x if hasattr(x, "dtype") else np.asarray(x), opened)
    return rebuild(_put(opened, _shardings(opened, plan, flax_nnx.metadata(tree), of)))


def _put(tree: PyTree, shardings: PyTree) -> PyTree:
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
        return jax.lax.with_sharding_constraint(tree, shardings)
    return jax.tree.map(lambda leaf, sharding: jax.device_put(owned(leaf), sharding), tree, shardings)


def _shardings(opened: PyTree, plan: Plan, specs: Any, of: Any) -> PyTree:
    """Return a tree like `opened` (see `flax_nnx.opened`) of the sharding that each leaf has at rest."""
    refuse_offload(plan)
    if of is not None:
        placements = plan.tree_placements(flax_nnx.split(of)[0], flax_nnx.metadata(of))
        params = {placement.path: placement for placement in jax.tree.leaves(placements)}
        return jax.tree.map(plan.rest_sharding, plan.tree_placements(opened, of=params))
    sharded = lambda params: jax.tree.map(plan.rest_sharding, plan.tree_placements(params, specs))  # noqa: E731
    return flax_nnx.map_parameters(opened, sharded, lambda leaf: plan.replicated)


def check_init(init: Any, *, of: bool = False) -> None:
    """Check that `init` can be called with a key, or with parameters if `of`."""
    rule = f"`init` is a function of ({'params' if of else 'rng'}), which makes {'their tree' if of else 'the model'}"
    # a model: an equinox module is a tree of arrays, a linen module has `apply`
    is_model = hasattr(init, "apply") or any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(init))
    is_model &= not isinstance(init, jax.tree_util.Partial)
    if flax_nnx.is_module(init) or not callable(init) or is_model:
        fix = "Write lambda rng: Model(rngs=nnx.Rngs(rng)), or lambda rng: params for weights that exist"
        if of:
            fix = "Write jdp.init(tx.init, plan, of=params)"
        elif is_optimizer(init):
            fix = "Write the arguments in this order: jdp.init_state(init, tx, plan, rng=...)"
        raise UserError(f"{rule}; given {described(init)}. {fix}.")
    is_class = isinstance(init, type)  # flax's classes are called through a function of any arguments
    try:
        signature = inspect.signature(init.__init__ if is_class else init)
    except (TypeError, ValueError):  # of a function that is not written in Python
        return
    if is_class and [*signature.parameters][1:2] == ["rngs"]:
        raise UserError(f"{rule}; given the class {init.__name__}. Write lambda rng: {init.__name__}(nnx.Rngs(rng)).")
    try:
        signature.bind(*(None,) * (2 if is_class else 1))
    except TypeError:
        given = getattr(init, "__name__", type(init).__name__) + cut(str(signature))
        raise UserError(f"{rule}; given {given}. Write a function of one argument.") from None


def check_tree(tree: Any, of: Any = None, *, arrays: bool = False) -> None:
    """Check that a tree is one module or optimizer, or a pytree of arrays."""
    check_keys(tree)
    if flax_nnx.is_optimizer(tree) and of is None:
        raise UserError(
            "An optimizer's state is sharded like its parameters; given an nnx.Optimizer alone. Pass its model: "
            "of=model."
        )
    if (path := flax_nnx.module_inside(tree)) is not None:
        raise UserError(
            f"A tree is one module, one nnx.Optimizer, or a pytree of arrays; given a {type(tree).__name__} with a "
            f"module at {path}. Pass each module by itself."
        )
    for path, leaf in jax.tree.leaves_with_path(flax_nnx.opened(tree)[0]):
        is_number = isinstance(leaf, int | float | complex) and not arrays
        if isinstance(leaf, type) or not (hasattr(leaf, "dtype") or is_number):
            raise UserError(
                f"A tree to shard holds arrays only; {jax.tree_util.keystr(path) or 'it'} is {leaf!r}. Close over "
                "everything else (in equinox: params, static = eqx.partition(model, eqx.is_array))."
            )


def refuse_offload(plan: Plan) -> None:
    """Refuse a plan that keeps a part of a train state on the host."""
    if plan.offload is not None:
        raise UserError(
            f"A custom loop keeps its arrays on the devices; given a plan with offload={plan.offload!r}. Leave it out, "
            "or use jdp.make_train_step, which fetches its state from the host."
        )


def typed_key(rng: Any) -> jax.Array:
    """Return `rng` as a typed key; a legacy uint32 key is accepted as well."""
    rule = "rng is one key, such as jax.random.key(0)"
    if not isinstance(getattr(rng, "shape", None), tuple):  # an nnx.Rngs has every attribute
        given = repr(rng) if rng is None or isinstance(rng, int | float | str) else f"a {type(rng).__name__}"
        fix = "Pass a key that it makes: rngs.params()" if callable(rng) else "Make one from the seed"
        raise UserError(f"{rule}; given {given}. {fix}.")
    try:
        key = rng if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(rng)
    except (TypeError, ValueError) as error:
        raise UserError(f"{rule}; given {described(rng)}. Pass one.") from error
    if key.shape:
        raise UserError(f"{rule}; given keys of shape {list(key.shape)}. Pass one.")
    return key


def resolve(params: PyTree, adapter: Any, wrt: Any) -> tuple[bool, ...] | None:
    """Return for each leaf of `params`, in order, whether it is trained (`wrt`); None if all are."""
    leaves = jax.tree.leaves_with_path(params)
    if not leaves:
        raise UserError("A model must have parameters: a module or a pytree with arrays; given one without. Add some.")
    paths = [path_of(path) for path, _ in leaves]
    selected = _selected(paths, adapter, wrt)
    for (_, leaf), path, trained in zip(leaves, paths, selected, strict=True):
        if trained and not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise UserError(
                f"Every parameter that is trained must be floating point; {path} is {leaf.dtype}. Freeze it (wrt="
                "patterns of the trained parameters), or keep it out of the parameters (in NNX: a variable that is not "
                "an nnx.Param). Split complex weights into real and imaginary parts."
            )
    return None if all(selected) else selected


def _selected(paths: list[str], adapter: Any, wrt: Any) -> tuple[bool, ...]:
    if wrt is None:
        return (True,) * len(paths)
    if flax_nnx.is_pattern(wrt):
        patterns = [wrt] if isinstance(wrt, str) else wrt
        for pattern in patterns:
            if not any(matches(path, pattern) for path in paths):
                raise UserError(
                    f"Every pattern of `wrt` must match a parameter; {pattern!r} matches none of {listed(paths, 5)}."
                )
        selected = tuple(matches(path, patterns) for path in paths)
    elif adapter is None:
        raise UserError(
            f"For a pytree, `wrt` is a path pattern or several ('head/*'); given {described(wrt)}. Write patterns."
        )
    else:
        selected = flax_nnx.matches(adapter, paths, wrt)
    if not any(selected):
        raise UserError(f"`wrt` must leave something to train; {wrt!r} matches none of {listed(paths, 5)}.")
    return selected
