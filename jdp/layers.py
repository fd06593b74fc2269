"""The layer loop of a deep model: the one place where ZeRO-3 gathers a layer, and where rematerialisation is chosen.

Under ZeRO-3 a step hands the loss function whole parameters, gathered at the top, so that any code that uses them is
right. Beside them it keeps a table: this gathered array came from that shard (`Lifts`). `scan_layers` looks its
leaves up in the table and loops over the *shards* instead, gathering one layer inside the loop, and again in the
backward pass. The gather at the top is then dead code and the compiler drops it. A leaf that is not in the table (it
was cast or reshaped on the way) is used as it is: right, but gathered for the whole step; that is said once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, MutableSequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax

from jdp.notices import notice
from jdp.placement import Placement
from jdp.types import PyTree

Lift = Callable[[jax.Array, Placement, int], jax.Array]
"""`lift(shard, placement, leading)`: gather a shard whose first `leading` dims were sliced off."""

Remat = str | Callable[..., bool] | None


@dataclass(frozen=True)
class Lifts:
    """The parameters of the loss being traced: id of the gathered array -> (that array, its shard, where it lives)."""

    lift: Lift
    table: dict[int, tuple[jax.Array, jax.Array, Placement]]


_AT_WORK: ContextVar[Lifts | None] = ContextVar("jdp_lifts", default=None)


@contextmanager
def lifting(lifts: Lifts) -> Generator[None]:
    """While a loss is traced inside, `scan_layers` gathers by `lifts`."""
    token = _AT_WORK.set(lifts)
    try:
        yield
    finally:
        _AT_WORK.reset(token)


def scan_layers(block: Callable[[Any, Any], Any], stacked: PyTree, x: PyTree, *, remat: Remat = None) -> PyTree:
    """Run `x = block(layer, x)` over all layers.

    Args:
        block: `block(layer, x)` -> x of the same structure, shapes and dtypes. It may close over anything but
            parameters.
        stacked: either a pytree (an NNX module is one; so is a tuple of a module and per-layer keys) whose leaves all
            have a leading layer dimension: the loop is a `jax.lax.scan`, compiled once. Or a list (`nnx.List`) of
            per-layer pytrees: the loop is unrolled.
        x: the activations that enter the first layer.
        remat: what the backward pass keeps. None: every activation; "dots": the results of matrix products; "full":
            each layer's input only; or a policy of `jax.checkpoint_policies`. Gathered weights are never kept.

    Returns:
        The activations that leave the last layer.

    Raises:
        ValueError: leaves of `stacked` disagree about the number of layers, or `remat` is unknown.
    """
    lifts = _AT_WORK.get()
    if isinstance(stacked, list | MutableSequence):
        for layer in stacked:
            body, operands = _body(block, layer, lifts, leading=0, remat=remat)
            x = body(x, operands)
        return x
    _check_stacked(stacked)
    body, operands = _body(block, stacked, lifts, leading=1, remat=remat)
    return jax.lax.scan(lambda x, layer: (body(x, layer), None), x, operands)[0]


def _body(
    block: Callable[[Any, Any], Any], layers: PyTree, lifts: Lifts | None, *, leading: int, remat: Remat
) -> tuple[Callable[[Any, Any], Any], list[Any]]:
    """The loop's body on operands (shards where we have them, whole leaves elsewhere), and those operands."""
    paths, treedef = jax.tree.flatten_with_path(layers)
    sources = [_source(jax.tree_util.keystr(path), leaf, lifts, leading) for path, leaf in paths]
    places = [place for _, place in sources]

    def body(x: Any, operands: list[Any]) -> Any:
        whole = [
            leaf if lifts is None or place is None else lifts.lift(leaf, place, leading)
            for leaf, place in zip(operands, places, strict=True)
        ]
        return block(jax.tree.unflatten(treedef, whole), x)

    lifted = any(place is not None for place in places)
    if remat is not None or lifted:  # inside a scan nothing can be merged across iterations: no barriers needed
        body = jax.checkpoint(body, policy=_policy(remat), prevent_cse=leading == 0)
    return body, [leaf for leaf, _ in sources]


def _source(name: str, leaf: Any, lifts: Lifts | None, leading: int) -> tuple[Any, Placement | None]:
    """What the loop runs over for one leaf: its shard and where that lives, or the leaf itself and None."""
    if lifts is None:
        return leaf, None
    if id(leaf) not in lifts.table:
        if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):  # keys and tables are no parameters
            return leaf, None
        notice(
            f"scan_layers: {name} {leaf.shape} is not a parameter as it stands in the model, so it is gathered for the "
            "whole step; cast or reshape it inside the block"
        )
        return leaf, None
    _, shard, place = lifts.table[id(leaf)]
    if place.dim is None:
        return leaf, None
    if place.dim < leading:
        notice(
            f"{place.path} {list(place.shape)} is sharded over its layer dimension, so it is gathered for the whole "
            f"step; pin another one with a rule: Plan(..., rules=[({place.path!r}, PartitionSpec(None, 'data'))])"
        )
        return leaf, None
    return shard, place


def _policy(remat: Remat) -> Callable[..., bool]:
    """A checkpoint policy that never keeps gathered weights."""
    policies = {
        None: _save_activations,
        "full": jax.checkpoint_policies.nothing_saveable,
        "dots": jax.checkpoint_policies.dots_saveable,
    }
    if callable(remat):
        return lambda prim, *args, **params: prim.name not in _GATHERS and bool(remat(prim, *args, **params))
    if remat not in policies:
        raise ValueError(f'remat is None, "full", "dots" or a checkpoint policy; got {remat!r}.')
    return policies[remat]


_GATHERS = {"all_gather", "sharding_constraint", "optimization_barrier"}
_SHAPE_ONLY = {"reshape", "transpose", "broadcast_in_dim", "squeeze", "slice", "concatenate"}


def _save_activations(prim: Any, *operands: Any, **params: Any) -> bool:
    """Keep what the block computed, but neither a gathered weight nor a reshaped or widened copy of one.

    A cast is kept where it narrows: then its result is what the backward pass needs, and its operand twice as large.
    """
    if prim.name == "convert_element_type":
        return params["new_dtype"].itemsize < operands[0].dtype.itemsize
    return prim.name not in _GATHERS and prim.name not in _SHAPE_ONLY


def _check_stacked(stacked: PyTree) -> None:
    counts: dict[int, str] = {}
    for path, leaf in jax.tree.leaves_with_path(stacked):
        name = jax.tree_util.keystr(path)
        if not leaf.shape:
            raise ValueError(f"scan_layers: every leaf needs a leading layer dimension; {name} is a scalar.")
        counts.setdefault(leaf.shape[0], name)
    if len(counts) != 1:
        found = ", ".join(f"{name} has {count}" for count, name in counts.items()) or "there are no leaves"
        raise ValueError(f"scan_layers: every leaf has one leading layer dimension, the same for all; {found}.")
