"""What a step is called with: arrays that nobody else writes into, and a state that was not given away."""

from typing import Any

import jax
import numpy as np

from jdp.core.agreement import Fact, agree, key_fact, program_fact
from jdp.core.paths import path_of
from jdp.core.sharding.plan import Plan
from jdp.core.state import TrainState
from jdp.core.types import Batch

ONE_PROCESS_RULE = (
    "With several processes each reads its own rows, and a step takes global arrays; batch {path} is {kind} of this "
    "process alone. Write `for batch in jdp.shard_batches(loader, plan)` around the loader."
)


def batch_rows(batch: Batch) -> int:
    """The leading size that all arrays of a batch share."""
    sizes = {path: leaf.shape[:1] for path, leaf in jax.tree.leaves_with_path(batch)}
    if not sizes or len(set(sizes.values())) != 1 or () in sizes.values():
        by_size = {size: path for path, size in reversed(sizes.items())}
        found = [f"{jax.tree_util.keystr(p)}: {s[0] if s else 'a scalar'}" for s, p in reversed(by_size.items())]
        more = f"; {len(sizes)} arrays in all" if len(sizes) > len(found) else ""
        entries = " A list is taken entry by entry: np.asarray makes an array of it." if () in by_size else ""
        raise ValueError(
            "All arrays of a batch share their leading dimension, the examples; got "
            f"{', '.join(found[:4]) or 'none'}{', …' if len(found) > 4 else ''}{more}.{entries}"
        )
    return next(iter(sizes.values()))[0]


def nearest_sizes(size: int, unit: int) -> str:
    """The multiples of `unit` around `size`, for messages: "56 or 64"."""
    below = size // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def interleave(x: jax.Array, count: int, group: int = 1) -> jax.Array:
    """[rows, ...] -> [count, rows / count, ...]: microbatch k gets rows k, k + count, ...; or groups of rows likewise.

    Every device then cuts its own rows and nothing moves; a contiguous split makes XLA gather the whole batch.
    """
    rows, rest = x.shape[0], x.shape[1:]
    return x.reshape(-1, count, group, *rest).swapaxes(0, 1).reshape(count, rows // count, *rest)


def owned(leaf: Any) -> Any:
    """A copy of an array that its maker may write into again: JAX reads NumPy's memory later, or keeps it for its own.

    On the CPU an aligned NumPy array becomes a `jax.Array` without a copy (`may_alias=False` does not prevent it), and
    elsewhere it may be read while it is being transferred: a loader that fills one buffer again and again (NumPy,
    torch, shared memory, a memory map) would change batches that were handed over before.
    """
    return leaf if isinstance(leaf, jax.Array) else np.array(np.asarray(leaf))


def owned_batch(batch: Batch) -> Batch:
    """The batch, with copies of the leaves that are NumPy's."""
    if any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(batch)):
        return jax.tree.map(lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, batch)
    return batch


def check_alive(state: Any) -> None:
    """Refuse a state whose memory a train step took over: on several CPU devices, using it ends the process.

    Looks at two leaves only, as every call does so: the count of steps and the first of the parameters.
    """
    first = getattr(state, "params", None)
    while isinstance(first, dict) and first:
        first = next(iter(first.values()))
    if _is_deleted(getattr(state, "step", None)) or _is_deleted(first):
        raise ValueError(
            "A train step takes its state's memory over (donates it), and this state was given to one before: go on "
            "with the state that it returned, `state, metrics = train_step(state, batch)`, or make the step with "
            "make_train_step(..., donate=False), which keeps the old one."
        )


def _is_deleted(leaf: Any) -> bool:
    try:
        return leaf.is_deleted()
    except (AttributeError, jax.errors.ConcretizationTypeError):  # no array of JAX's; a tracer, in a jit of the user's
        return False


def signature(batch: Batch) -> Any:
    """What tells one program's batches from another's; hashable, and cheap enough for every call. None for tracers."""
    leaves, treedef = jax.tree.flatten(batch)
    try:
        return treedef, tuple((leaf.shape, leaf.dtype) if _is_global(leaf) else None for leaf in leaves)
    except jax.errors.ConcretizationTypeError:  # in a jitted function of the user's nothing can be looked at
        return None


def check_global(batch: Batch) -> None:
    """With several processes: every leaf is an array over all of them. One process' rows would be taken for all rows.

    Raises:
        ValueError: a leaf lies on this process alone.
    """
    for path, leaf in jax.tree.leaves_with_path(batch):
        if not _is_global(leaf):
            kind = "an array" if isinstance(leaf, jax.Array) else f"a {type(leaf).__module__}.{type(leaf).__name__}"
            where = jax.tree_util.keystr(path) or "itself"
            raise ValueError(ONE_PROCESS_RULE.format(path=where, kind=kind))


def agree_on_inputs(place: str, state: TrainState, batch: Batch, plan: Plan) -> None:
    """All processes hold the same shapes, dtypes and key."""
    fix = "Each process feeds as many rows as it has shards of the batch (jdp.process_rows), and all the same dtypes."
    facts = [
        Fact("The batch's shapes and dtypes", _shapes(batch), fix),
        Fact("The state's shapes and dtypes", _shapes(state), "Make the state alike: one model, one optimizer."),
        plan_fact(plan),
        key_fact(state.rng, "The state's key"),
    ]
    agree(place, facts, plan.mesh)


def agree_on_program(place: str, lowered: jax.stages.Lowered, plan: Plan) -> None:
    """All processes lowered the same program."""
    agree(place, [program_fact(lowered)], plan.mesh)


def plan_fact(plan: Plan) -> Fact:
    """The plan: strategy, axes, devices in their order, rules."""
    devices = [device.id for device in plan.mesh.devices.flat]
    rules = [f"{pattern}: {spec}" for pattern, spec in plan.rules]
    lines = [plan.strategy, f"{dict(plan.mesh.shape)}", f"devices {devices}", *rules, f"{plan.min_shard_size}"]
    return Fact("The plan", "\n".join(lines), "Make mesh and plan of the same values on every process.")


def _is_global(leaf: Any) -> bool:
    return not getattr(leaf, "is_fully_addressable", True)


def _shapes(tree: Any) -> str:
    leaves = jax.tree.leaves_with_path(tree)
    return "\n".join(f"{path_of(path) or 'it'}: {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves)
