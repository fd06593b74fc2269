"""The layer loop of a deep model: the one place where ZeRO-3 gathers a layer, and where rematerialisation is chosen.

Under ZeRO-3 a step hands the loss function whole parameters, gathered at the top, so that any code that uses them is
right. Beside them it keeps a table: this gathered array came from that shard (`GatherTable`). `scan_layers` looks its
leaves up in the table and loops over the *shards* instead, gathering one layer inside the loop, and again in the
backward pass. The gather at the top is then dead code and the compiler drops it. A leaf that is not in the table (it
was cast or reshaped on the way) is used as it is: right, but gathered for the whole step; that is said once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, MutableSequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax

from jdp.core.flax_nnx import changes
from jdp.core.notices import notice
from jdp.core.sharding.placement import Placement
from jdp.core.types import PyTree

Gather = Callable[[jax.Array, Placement, int], jax.Array]
"""`gather(shard, placement, leading)`: gather a shard whose first `leading` dims were sliced off."""

Remat = str | Callable[..., bool] | None
Block = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class GatherTable:
    """The parameters of the loss being traced: id of the gathered array -> (that array, its shard, where it lives).

    `used` takes the names of the weights that `scan_layers` was given, gathered by layer or not.
    """

    gather: Gather
    table: dict[int, tuple[jax.Array, jax.Array, Placement]]
    used: set[str] = field(default_factory=set[str])


_AT_WORK: ContextVar[GatherTable | None] = ContextVar("jdp_gathers", default=None)


@contextmanager
def gathering(gathers: GatherTable) -> Generator[None]:
    """While a loss is traced inside, `scan_layers` gathers by this table."""
    token = _AT_WORK.set(gathers)
    try:
        yield
    finally:
        _AT_WORK.reset(token)


def scan_layers(block: Block, stacked: PyTree, x: PyTree, *, remat: Remat = None) -> PyTree:
    """Run `x = block(layer, x)` over all layers.

    What a block changes in an NNX module (batch statistics, counters, the state of random streams) stays changed, as
    in a Python loop over the layers: over the list itself, or over the slices of the stack, whose changes are stacked
    again. Of what the layers share, or the block closes over, each layer finds what the one before left.

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
        ValueError: leaves of `stacked` disagree about the number of layers, `remat` is unknown, or the block changes a
            module that is neither among the layers nor in its closure.
    """
    gathers = _AT_WORK.get()
    if isinstance(stacked, list | MutableSequence):
        for layer in stacked:
            x = _unrolled(block, layer, x, gathers, remat)
        return x
    _check_stacked(stacked)
    return _scanned(block, stacked, x, gathers, remat)


def _unrolled(block: Block, layer: PyTree, x: PyTree, gathers: GatherTable | None, remat: Remat) -> PyTree:
    """One layer of a list. Where nothing asks for a trace of its own, the call is the plain one."""
    body = _Body(block, changes.take_apart(layer), gathers, leading=0, remat=remat)
    if not body.is_apart:
        with changes.explaining():
            return block(layer, x)
    x, own, held = body.checkpointed(x, body.operands, changes.values(body.outside))
    body.parts.write(body.own, own)
    changes.assign([body.outside[i] for i in body.moved], [held[i] for i in body.moved])
    return x


def _scanned(block: Block, stacked: PyTree, x: PyTree, gathers: GatherTable | None, remat: Remat) -> PyTree:
    """What a layer changes in itself leaves the scan stacked; what it changes elsewhere goes from layer to layer."""
    body = _Body(block, changes.take_apart(stacked), gathers, leading=1, remat=remat)
    if body.outside:  # of what is within its reach, only what it changes is carried
        first = jax.tree.map(lambda leaf: leaf[0], body.operands)
        jax.eval_shape(body, x, first, changes.values(body.outside))
        body.outside = [body.outside[i] for i in body.moved]

    def layer(carry: Any, operands: list[Any]) -> tuple[Any, list[Any]]:
        x, held = carry
        x, own, held = body.checkpointed(x, operands, held)
        return (x, held), own

    (x, held), own = jax.lax.scan(layer, (x, changes.values(body.outside)), body.operands)
    body.parts.write(body.own, own)
    changes.assign(body.outside, held)
    return x


class _Body:
    """The call of one layer as a function of arrays alone, which is what JAX can loop over and trace apart.

    Attributes:
        parts: the layer, or all of them stacked, taken apart.
        outside: variables that the block can change without being given them.
        operands: what the loop runs over, for each array of `parts`: its shard where we have one, else the array.
        places: where the shard lives; None for what is whole.
        own, moved: once traced, what the call changed in the layer, and which of `outside`.
    """

    def __init__(
        self, block: Block, parts: changes.Parts, gathers: GatherTable | None, *, leading: int, remat: Remat
    ) -> None:
        tables = [None if is_state else gathers for is_state in parts.are_state]
        sources = [_source(*entry, known, leading) for entry, known in zip(parts.arrays, tables, strict=True)]
        self.block, self.parts, self.gathers, self.leading, self.remat = block, parts, gathers, leading, remat
        self.operands, self.places = [leaf for leaf, _ in sources], [place for _, place in sources]
        self.rematerialised = remat is not None or any(place is not None for place in self.places)
        self.is_apart = leading > 0 or self.rematerialised
        self.outside = changes.closed_over(block, apart_from=parts.variables) if self.is_apart else []
        self.own: changes.Record = []
        self.moved: list[int] = []

    def __call__(self, x: Any, operands: list[Any], held: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Return the activations, what the call changed in the layer, and what `outside` then holds."""
        gathers, leading = self.gathers, self.leading
        whole = [
            leaf if gathers is None or place is None else gathers.gather(leaf, place, leading)
            for leaf, place in zip(operands, self.places, strict=True)
        ]
        layer = self.parts.together(whole)
        with changes.standing_in(self.outside, held), changes.explaining():
            x = self.block(layer, x)
            after = changes.values(self.outside)
        self.own, own = self.parts.changes(layer, whole)
        self.moved = [i for i, (old, new) in enumerate(zip(held, after, strict=True)) if not changes.same(old, new)]
        return x, own, after

    @property
    def checkpointed(self) -> Callable[..., Any]:
        if not self.rematerialised:
            return self
        # inside a scan nothing can be merged across iterations: no barriers needed
        return jax.checkpoint(self.__call__, policy=_policy(self.remat), prevent_cse=self.leading == 0)


def _source(name: str, leaf: Any, gathers: GatherTable | None, leading: int) -> tuple[Any, Placement | None]:
    """What the loop runs over for one leaf: its shard and where that lives, or the leaf itself and None."""
    if gathers is None:
        return leaf, None
    if id(leaf) not in gathers.table:
        if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):  # keys and tables are no parameters
            return leaf, None
        gathers.used.add(name)
        notice(
            f"scan_layers: {name} {leaf.shape} is not a parameter as it stands in the model, so it is gathered for the "
            "whole step; cast or reshape it inside the block"
        )
        return leaf, None
    _, shard, place = gathers.table[id(leaf)]
    gathers.used.add(name)
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
