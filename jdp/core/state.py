"""The train state: everything a step changes, in one pytree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Generic, cast

import jax
import optax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp.base.tree_paths import path_of
from jdp.core.sharding.leaf_table import leaf_text, leaves_of
from jdp.core.sharding.padded import Change, Flat
from jdp.core.types import Model, PyTree


@dataclass(frozen=True)
class Static:
    """The part of a state that is no array, fixed when the state is made: part of the tree's structure, not a leaf.

    Attributes:
        tx: the optimizer; therefore a step takes only a state and a batch.
        adapter: makes the argument of the loss function of `params` and `model_state` (a `flax_nnx.Adapter` for an NNX
            module); None if the loss function takes the parameters themselves.
        specs: (path, PartitionSpec) for the parameters that the model's own metadata shards; rules override them.
        trained: for each leaf of the parameters, in order, whether it is trained; None if all are.
        flat: (path in the state, such as "params/embedding", `Flat`) for the leaves that are flat and padded.
        whole: paths of the parameters of which an update takes each matrix whole on one device.
        inner_products: an update takes inner products of sharded arrays, which are sums in their own shapes.
    """

    tx: optax.GradientTransformation
    adapter: Any = None
    specs: tuple[tuple[str, PartitionSpec], ...] = ()
    trained: tuple[bool, ...] | None = None
    flat: tuple[tuple[str, Flat], ...] = ()
    whole: tuple[str, ...] = ()
    inner_products: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState(Generic[Model]):
    """Everything a step changes, as a pytree of global arrays. Immutable: a step returns a new one.

        >>> int(state.step), int(state.consumed)
        (0, 0)
        >>> state.model(jnp.ones((1, 64))).shape  # the NNX module with these weights
        (1, 32)

    By default a step donates the old state's memory to the new one: continue with the state that it returned.

    Attributes:
        step: int32 scalar: optimizer steps taken. Schedules count these.
        params: master weights, trained and frozen ones, sharded between steps as the plan says. Nested dicts for an NNX
            module, else the pytree that `init` returned. A leaf is flat and padded if none of its dimensions divides by
            the number of devices (`Plan.pad`); `unpadded()` has all leaves in their own shapes.
        opt_state: the optimizer's state; leaves that mirror a parameter are sharded like it. Frozen parameters have
            none.
        model_state: nested dict of NNX variables that are not parameters (BatchNorm statistics), replicated; `{}` if
            there are none.
        rng: scalar typed PRNG key from which every step's randomness is derived; it never changes.
        skipped: int32 scalar: steps that changed nothing because a gradient or a part of the new state was not finite.
        static: the optimizer and everything else that is no array; see `Static`.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    rng: jax.Array
    skipped: jax.Array
    static: Static = field(metadata={"static": True})

    def __repr__(self) -> str:
        return leaf_text("TrainState", leaves_of(self))

    @property
    def consumed(self) -> jax.Array:
        """int32 scalar, `step + skipped`: batches consumed so far. The data continues there; it names a checkpoint."""
        return self.step + self.skipped

    @property
    def model(self) -> Model:
        """The model with these weights: an NNX module in evaluation mode, or `params` if `init` returned a pytree.

        Weights that are flat and padded (`Plan.pad`) are gathered.
        """
        params = own_shaped(self.params, "params", self.static)
        if self.static.adapter is None:
            return params
        return self.static.adapter.merge(params, self.model_state, rng=None)

    def unpadded(self) -> TrainState[Model]:
        """Return the state with every leaf in its own shape; leaves that were flat and padded are then replicated.

        `jdp.place` pads them again.
        """
        fields = own_shaped({"params": self.params, "opt_state": self.opt_state}, "", self.static)
        return replace(self, **fields, static=replace(self.static, flat=(), whole=(), inner_products=False))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Models:
    """What a loss is called with, beside a batch: of a train state, or of the models of a gradient.

    Attributes:
        params, model_state, rng, static: as in `TrainState`; there may be several models, in tuples.
    """

    params: PyTree
    model_state: PyTree
    rng: jax.Array
    static: Static = field(metadata={"static": True})


AnyState = TrainState[Any] | Models
"""What has parameters, model state, a key and a `Static`."""


def map_flat(function: Callable[[Any, Flat], Any], tree: PyTree, name: str, static: Static) -> PyTree:
    """Return a tree with the leaves that are flat and padded replaced by a function's results."""
    if not static.flat:
        return tree
    flat = dict(static.flat)

    def mapped(path: Any, leaf: Any) -> Any:
        own = flat.get(f"{name}/{path_of(path)}".strip("/"))
        return leaf if own is None else function(leaf, own)

    return jax.tree.map_with_path(mapped, tree)


def own_shapes(params: PyTree, static: Static) -> PyTree:
    """Return parameters in their own shapes, as `jax.ShapeDtypeStruct` if they are flat and padded."""
    return map_flat(lambda x, flat: jax.ShapeDtypeStruct(flat.shape, x.dtype), params, "params", static)


def own_shaped(tree: PyTree, name: str, static: Static) -> PyTree:
    """Return fields of a state, real, abstract or traced, with every leaf in its own shape."""
    gathered = list[tuple[jax.Array, Change, Any]]()

    def own(x: Any, flat: Flat) -> Any:
        if isinstance(x, Tracer):
            return flat.from_rest(x)
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec())
        if isinstance(x, jax.ShapeDtypeStruct):
            shape = (*x.shape[: len(x.shape) - len(flat.at_rest)], *flat.shape)
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)
        if isinstance(x, jax.Array) and not x.is_deleted():  # else it was donated, which its reader reports
            gathered.append((x, Change(flat, None), sharding))
        return x

    tree = map_flat(own, tree, name, static)
    made = {id(x): new for (x, _, _), new in zip(gathered, changed(gathered), strict=True)}
    return jax.tree.map(lambda x: made.get(id(x), x), tree) if made else tree


def changed(leaves: Sequence[tuple[jax.Array, Change, Any]]) -> list[jax.Array]:
    """Return leaves of one mesh in other forms, made by one program.

    On CPUs this waits for its end: several programs at once would hold threads that the others' collectives wait for.
    """
    if not leaves:
        return []
    arrays, changes, shardings = zip(*leaves, strict=True)
    if not isinstance(shardings[0], NamedSharding):
        return [change(x) for x, change in zip(arrays, changes, strict=True)]
    made, mesh = _program(changes, shardings)(arrays), cast("Mesh", shardings[0].mesh)
    return jax.block_until_ready(made) if mesh.devices.flat[0].platform == "cpu" else made


@lru_cache
def _program(changes: tuple[Change, ...], shardings: tuple[Any, ...]) -> Callable[..., list[jax.Array]]:
    def make(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        return [change(x) for x, change in zip(arrays, changes, strict=True)]

    return jax.jit(make, out_shardings=list(shardings))


def trained_part(tree: PyTree, trained: Sequence[bool] | None) -> PyTree:
    """Return a tree like the parameters with None for frozen leaves."""
    if trained is None:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([leaf if kept else None for leaf, kept in zip(leaves, trained, strict=True)])


def with_trained(tree: PyTree, part: PyTree, trained: Sequence[bool] | None) -> PyTree:
    """Return `tree` with its trained leaves replaced by those of `part`, a tree as `trained_part` returns it."""
    if trained is None:
        return part
    leaves, treedef = jax.tree.flatten(tree)
    new = iter(jax.tree.leaves(part))
    return treedef.unflatten([next(new) if kept else leaf for leaf, kept in zip(leaves, trained, strict=True)])
