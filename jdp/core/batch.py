"""Check the arguments of a step: rows and devices of the batch, a state that was not donated, equal processes."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from jdp.base.errors import UserError
from jdp.base.formatting import listed
from jdp.base.toml import cut, described
from jdp.base.tree_paths import check_keys, path_of
from jdp.core.cluster.agreement import Fact, agree, key_fact, program_fact
from jdp.core.compiling.options import CompilerValue
from jdp.core.plan import Plan
from jdp.core.state import AnyState, TrainState
from jdp.core.types import Batch


def batch_rows(batch: Batch) -> int:
    """Return the number of rows (examples): the leading size that all arrays of a batch share."""
    sizes: dict[Any, tuple[int, ...]] = {}
    for path, leaf in jax.tree.leaves_with_path(batch):
        dtype: Any = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        if getattr(dtype, "kind", None) in tuple("OSUMm"):
            given = f"{dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else cut(described(leaf), 40)
            raise UserError(
                f"A batch holds arrays of numbers; given batch{jax.tree_util.keystr(path)} = {given}. Leave it out, or "
                "convert it to numbers, as a tokenizer does with text."
            )
        sizes[path] = np.shape(leaf)[:1]
    if not sizes or len(set(sizes.values())) != 1 or () in sizes.values():
        by_size = {size: path for path, size in reversed(sizes.items())}
        shown = [f"{jax.tree_util.keystr(p)}: {s[0] if s else 'a scalar'}" for s, p in reversed(by_size.items())]
        counts = sorted(size[0] for size in by_size if size)
        fix = "Give the batch an array with a row for each example."
        if () in by_size:
            fix = "Give a scalar to each row: np.full(rows, value); make an array of a list: np.asarray."
        elif counts:
            divide = counts[0] > 1 and not any(count % counts[0] for count in counts)
            rows = " + ".join(str(count // counts[0]) for count in reversed(counts)) if divide else ""
            fix = (
                f"Put values that belong together into one row{f', {counts[0]} rows of {rows}' if divide else ''}; or "
                "stack a part for each device, [parts, ...], as for graphs, and use jax.vmap over the parts in the "
                "loss (jdp/core/losses.md)."
            )
        raise UserError(
            "All arrays of a batch share their leading dimension, the examples; given "
            f"{listed(shown, 4) or 'none'}. {fix}"
        )
    return next(iter(sizes.values()))[0]


def interleave(x: jax.Array, count: int) -> jax.Array:
    """Split rows into microbatches: [rows, ...] -> [count, rows / count, ...], with rows k, k + count, ... in row k.

    Every device then splits its own rows and nothing is sent; a contiguous split makes XLA gather the whole batch.
    """
    rows, dims = x.shape[0], x.shape[1:]
    return x.reshape(rows // count, count, *dims).swapaxes(0, 1)


def joined(x: jax.Array) -> jax.Array:
    """Undo `interleave`: [count, rows / count, ...] -> [rows, ...]."""
    return x.swapaxes(0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def owned(leaf: Any) -> Any:
    """Copy an array that is no `jax.Array`: on CPUs JAX may share its buffer, which a loader may write into again.

    Raises ValueError for integers that JAX's dtype for them cannot hold: JAX would take 2**32 for 0 without a word.
    """
    if isinstance(leaf, jax.Array):
        return leaf
    array = np.array(np.asarray(leaf))
    if array.dtype.kind in "iu" and array.itemsize == 8:
        taken = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
        if np.any(wrong := taken != array):
            raise UserError(f"JAX holds {array.dtype} as {taken.dtype}; given {array[wrong][0]}. Leave it out.")
    return array


def check_state(state: Any, call: str, batch: Any = None) -> None:
    """Check that the state of a call is a `TrainState`, and not a step's whole result or an exchanged argument."""
    if isinstance(state, TrainState):
        return
    fix = "Make one: state = jdp.init_state(init, tx, plan, rng=jax.random.key(0))"
    if isinstance(state, tuple) and any(isinstance(entry, TrainState) for entry in state):
        fix = "A train step returns a pair: write `state, metrics = step(state, batch)`"
    elif isinstance(batch, TrainState):
        fix = "Write the arguments in this order"
    raise UserError(f"A state is a jdp.TrainState, as in {call}; given {described(state)}. {fix}.")


def check_operands(mesh: Mesh, batch: Any, **trees: Any) -> None:
    """Check the form of a batch, and that it and the other `trees` of a call are on the devices of the call's mesh."""
    if isinstance(batch, Iterator):
        raise UserError(f"A batch is a pytree of arrays; given {described(batch)}. Take batches from it by a loop.")
    check_keys(batch)
    batch_rows(batch)
    if jax.process_count() > 1:  # then `check_global` checks the arrays
        return
    devices, operands = set(mesh.devices.flat), {**trees, "batch": batch}
    for path, leaf in jax.tree.leaves_with_path(operands):
        is_placed = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.committed
        if is_placed and leaf.sharding.device_set != devices:
            name = path[0].key
            fix = f"Move it: {name} = jdp.place({name}, plan)"
            if name == "batch":
                fix = "Give NumPy arrays, or batches of jdp.shard_batches(loader, plan), by the step's own plan"
            raise UserError(
                f"Arrays of a call are on the devices of its plan, {_listed(devices)}; given {name}"
                f"{jax.tree_util.keystr(path[1:])} on {_listed(leaf.sharding.device_set)}. {fix}."
            )


def _listed(devices: Collection[Any]) -> str:
    """Return "16 cpu devices (0, 1, 2, 3, 4, 5, 6, 7 and 8 more)"."""
    numbers = map(str, sorted(device.id for device in devices))
    kind = f"{next(iter(devices)).platform} device{'s' * (len(devices) > 1)}"
    return f"{len(devices)} {kind} ({listed(numbers, 8)})"


def check_alive(state: Any) -> None:
    """Check that no train step has taken the state's memory: on several CPU devices, using it would end the process.

    Only two leaves are tested, because every call does it: the number of steps and the first of the parameters.
    """
    step, first = getattr(state, "step", None), getattr(state, "params", None)
    while isinstance(first, dict) and first:
        first = next(iter(first.values()))
    if _is_deleted(step) or _is_deleted(first):
        raise UserError(
            "A train step takes its state's memory over (donates it), and this state was given to one before: go on "
            "with the state that it returned, `state, metrics = train_step(state, batch)`, or make the step with "
            "make_train_step(..., donate=False), which keeps the old one."
        )


def _is_deleted(leaf: Any) -> bool:
    try:
        return leaf.is_deleted()
    except (AttributeError, jax.errors.ConcretizationTypeError):  # no JAX array, or a tracer in a user's function
        return False


def signature(batch: Batch) -> Any:
    """Return a hashable value, equal for batches that share a program; None for tracers. Every call does it."""
    leaves, treedef = jax.tree.flatten(batch)
    try:
        return treedef, tuple((leaf.shape, leaf.dtype) if _is_global(leaf) else None for leaf in leaves)
    except jax.errors.ConcretizationTypeError:  # a tracer in a user's jitted function
        return None


def check_global(batch: Batch) -> None:
    """Check that every leaf is a global array of several processes: a step takes the rows of a leaf for all rows."""
    for path, leaf in jax.tree.leaves_with_path(batch):
        if not _is_global(leaf):
            kind = "an array" if isinstance(leaf, jax.Array) else f"a {type(leaf).__module__}.{type(leaf).__name__}"
            raise UserError(
                "With several processes each reads its own rows, and a step takes global arrays; batch "
                f"{jax.tree_util.keystr(path) or 'itself'} is {kind} of this process alone. Write `for batch in "
                "jdp.shard_batches(loader, plan)` around the loader."
            )


def agree_on_inputs(caller: str, state: AnyState, batch: Batch, plan: Plan, *, again: bool = False) -> None:
    """Check that all processes have the same inputs; raise as `agree` does. `again`: they agreed on these before."""
    fix = "Each process feeds as many rows as it has shards of the batch (jdp.process_rows), and all the same dtypes."
    numbers = "\n".join(f"{path} = {text}" for path, _, text in local_numbers(state)) or "none"
    facts = [
        Fact("The batch's shapes and dtypes", _shapes(batch), fix),
        Fact("The numbers that were set in the state", numbers, "Set them on every process."),
    ]
    if not again:
        facts += [
            Fact("The state's shapes and dtypes", _shapes(state), "Make the state alike: one model, one optimizer."),
            plan_fact(plan),
            key_fact(state.rng, "The state's key"),
        ]
    agree(caller, facts, plan.mesh)


def local_numbers(state: AnyState) -> tuple[tuple[str, str, str], ...]:
    """Return (path, dtype, value) of the scalars that a user set in a train state, which only this process has."""
    names = ("params", "opt_state", "model_state") if isinstance(state, TrainState) else ()
    tree = {name: getattr(state, name) for name in names}
    try:
        if all(map(_is_ours, jax.tree.leaves(tree))):  # usual and fast, as each call of a step does it
            return ()
    except jax.errors.ConcretizationTypeError:  # a tracer in a user's jitted function
        return ()
    found = ((path_of(p), np.asarray(x)) for p, x in jax.tree.leaves_with_path(tree) if not _is_ours(x))
    return tuple((path, str(x.dtype), str(x)) for path, x in found)


def _is_ours(leaf: Any) -> bool:
    return bool(getattr(leaf, "shape", ())) or _is_global(leaf)


def agree_on_program(
    caller: str, lowered: jax.stages.Lowered, plan: Plan, compiler_options: Mapping[str, CompilerValue]
) -> None:
    options = "\n".join(f"{name} = {value!r}" for name, value in sorted(compiler_options.items()))
    fix = "Give every process the same `compiler`, and the same version of jax."
    agree(caller, [program_fact(lowered), Fact("The compiler's options", options, fix)], plan.mesh)


def plan_fact(plan: Plan) -> Fact:
    """Return the plan as a fact: strategy, axes, devices in their order, rules, smallest size to shard."""
    devices = [device.id for device in plan.mesh.devices.flat]
    rules = [f"{pattern}: {spec}" for pattern, spec in plan.rules]
    lines = [plan.strategy, f"{dict(plan.mesh.shape)}", f"devices {devices}", *rules, f"{plan.min_shard_size}"]
    return Fact("The plan", "\n".join(lines), "Make mesh and plan of the same values on every process.")


def _is_global(leaf: Any) -> bool:
    return not getattr(leaf, "is_fully_addressable", True)


def _shapes(tree: Any) -> str:
    leaves = jax.tree.leaves_with_path(tree)
    shapes = ((path, getattr(leaf, "dtype", type(leaf).__name__), [*np.shape(leaf)]) for path, leaf in leaves)
    return "\n".join(f"{path_of(path) or 'it'}: {dtype}{shape}" for path, dtype, shape in shapes)
