"""The train state: everything a step changes, in one pytree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic

import jax
import optax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp.base.notebook import Drawn
from jdp.base.tree_paths import path_of
from jdp.core.sharding.host_memory import on_device
from jdp.core.sharding.leaf_table import leaf_text, leaves_of
from jdp.core.sharding.padded import Change, Flat
from jdp.core.sharding.user_mesh import auto_axes, entered, mesh_of_home
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


STACKED = "rounds"
"""The entry of `TrainState.sync` that counts rounds of local steps; where it is, `opt_state` is each replica's own."""

MOMENTUM = "momentum"
"""The entry of `TrainState.sync` that is like the trained parameters, and sharded like them."""


ERROR = "mean_error"
"""The entry of `TrainState.sync` for the error of encoding the mean gradient; earlier: "error", of the sum."""

SQUARES = "squares"
"""What a synchroniser keeps during a step that measures noise: of each gradient before it is reduced the squared norm,
and its rows' squared weight, summed."""


@dataclass(frozen=True)
class TrainState(Drawn, Generic[Model]):
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
        sync: name -> what the synchronisation of gradients keeps between steps; {} if it keeps nothing. A step that
            needs it adds it (`Step.complete`). "mean_error": the error of encoding the mean gradient, [D, ...] for the
            D shards of the batch, sharded over them. "factor": PowerSGD's, replicated. "noise": averages of the noise
            scale, float32 [3]. "rounds": of local steps, int32 scalar; "momentum": theirs, sharded like the parameters.
            With local steps each leaf of `opt_state` is [R, ...] for the R replicas.
        static: the optimizer and everything else that is no array; see `Static`.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    rng: jax.Array
    skipped: jax.Array
    sync: dict[str, PyTree]
    static: Static

    def __repr__(self) -> str:
        return leaf_text("TrainState", leaves_of(self))

    if not TYPE_CHECKING:  # else every attribute would be one

        def __getattr__(self, name: str) -> Any:
            """Build the fields of a state that a step returned as leaves (`unread`), when they are first read."""
            leaves = self.__dict__.get("_leaves")
            if leaves is None or name not in _FIELDS:
                return object.__getattribute__(self, name)  # another thread may have built the fields meanwhile
            if name in leaves.layout.fixed:
                return leaves.fixed(name)
            for field_name, value in vars(leaves.state()).items():
                self.__dict__.setdefault(field_name, value)
            self.__dict__.pop("_leaves", None)  # who has a dict can change it
            return self.__dict__[name]

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FIELDS}

    @property
    def consumed(self) -> jax.Array:
        """int32 scalar, `step + skipped`: batches consumed so far. The data continues there; it names a checkpoint."""
        return self.step + self.skipped

    @property
    def model(self) -> Model:
        """The model with these weights: an NNX module in evaluation mode, or `params` if `init` returned a pytree.

        Weights in host memory (`Plan.offload`) are copied to the devices; weights that are flat and padded (`Plan.pad`)
        are gathered.
        """
        params = on_device(own_shaped(self.params, "params", self.static))
        if self.static.adapter is None:
            return params
        return self.static.adapter.merge(params, self.model_state, rng=None)

    def unpadded(self) -> TrainState[Model]:
        """Return the state with every leaf in its own shape; leaves that were flat and padded are then replicated.

        `jdp.place` pads them again. Of what synchronisation keeps (`sync`) only "momentum" changes.
        """
        fields = own_shaped({"params": self.params, "opt_state": self.opt_state}, "", self.static)
        momentum = own_shaped(self.sync[MOMENTUM], "params", self.static) if MOMENTUM in self.sync else None
        sync = self.sync if momentum is None else {**self.sync, MOMENTUM: momentum}
        return replace(self, **fields, sync=sync, static=replace(self.static, flat=(), whole=(), inner_products=False))


_FIELDS = tuple(field.name for field in fields(TrainState))


def _children(state: TrainState) -> tuple[tuple[Any, ...], Static]:
    own = vars(state)
    if (leaves := own.get("_leaves")) is not None:  # another thread may read the state meanwhile
        own = vars(leaves.state())
    return tuple([own[name] for name in _FIELDS[:-1]]), own["static"]


def _children_with_keys(state: TrainState) -> tuple[tuple[tuple[Any, Any], ...], Static]:
    children, static = _children(state)
    return tuple(zip(map(jax.tree_util.GetAttrKey, _FIELDS[:-1]), children, strict=True)), static


def _of_children(static: Static, children: Iterable[Any]) -> TrainState:
    state = object.__new__(TrainState)
    state.__dict__.update(zip(_FIELDS, (*children, static), strict=True))
    return state


jax.tree_util.register_pytree_with_keys(TrainState, _children_with_keys, _of_children, _children)


@dataclass(frozen=True)
class Layout:
    """Where a state's leaves belong.

    Attributes:
        tree: the structure of the state.
        static: as in `TrainState`.
        fixed: field -> the number of its leaf, for the fields that are one array and cannot be changed in place.
        kinds: the types of the leaves.
    """

    tree: Any
    static: Static = field(compare=False)
    fixed: dict[str, int] = field(compare=False)
    kinds: set[type] = field(compare=False)

    def leaves_of(self, state: Any, tree: Any = None) -> list[Any] | None:
        """Return the leaves of a state of this layout, or of another tree; None if it has another structure.

        Taking apart what has a known structure takes a third of the time of finding the structure and comparing it.
        """
        try:
            leaves = (tree or self.tree).flatten_up_to(state)
        except ValueError:
            return None
        return leaves if self.kinds.issuperset(map(type, leaves)) else None  # else one of them may be a tree


class Leaves:
    """A state as a list of leaves: an argument and result of jitted functions for which JAX walks no tree.

    A state has some hundred dictionaries. Taking them apart, comparing them with those that were compiled for, and
    building them again costs more than the other work of a call together with jdp's checks.

    Attributes:
        leaves: in the order of the state's tree.
        layout: where they belong.
        maker: the step that returned them; None if none did.
    """

    __slots__ = ("layout", "leaves", "maker")

    def __init__(self, layout: Layout, leaves: Iterable[Any]) -> None:
        self.layout, self.leaves, self.maker = layout, list(leaves), None

    @classmethod
    def of(cls, state: TrainState, layout: Layout | None = None) -> Leaves:
        """Return the leaves of a state; those of a state that nobody has read are at hand.

        Args:
            state: real, abstract or traced.
            layout: one that is used again if it is the state's, since equal ones take longer to compare.
        """
        if (known := unread_leaves(state)) is not None:
            return known
        if layout is not None and (own := layout.leaves_of(state)) is not None:
            return cls(layout, own)
        leaves, tree = jax.tree.flatten(state)
        if layout is not None and layout.tree == tree:  # its kinds may be those of tracers
            return cls(replace(layout, kinds={*map(type, leaves)}), leaves)
        fixed, start = dict[str, int](), 0
        for name, child in zip(_FIELDS[:-1], tree.children(), strict=True):
            if jax.tree_util.treedef_is_leaf(child) and child.num_leaves:
                fixed[name] = start
            start += child.num_leaves
        return cls(Layout(tree, state.static, fixed, {*map(type, leaves)}), leaves)

    def fixed(self, name: str) -> Any:
        return self.leaves[self.layout.fixed[name]]

    def state(self) -> TrainState:
        """Return the state."""
        return self.layout.tree.unflatten(self.leaves)

    def unread(self, maker: Any) -> TrainState:
        """Return the state, whose fields are built when they are first read."""
        state, self.maker = object.__new__(TrainState), maker
        state.__dict__.update(_leaves=self, static=self.layout.static)
        return state


def unread_leaves(state: Any) -> Leaves | None:
    """Return the leaves of a state that a step returned and of which nobody has read a tree, else None.

    They are the state as long as no tree was built of them, which its reader could change in place.
    """
    return vars(state).get("_leaves") if isinstance(state, TrainState) else None


def together(state: Any) -> Any:
    """Return the state itself, of a step or a gradient, whether it was given as leaves or not."""
    return state.state() if isinstance(state, Leaves) else state


class _Path:
    """The path of a leaf, which JAX's reports name an argument by."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def __str__(self) -> str:
        return jax.tree_util.keystr(self.path)


def _leaves_with_keys(state: Leaves) -> tuple[list[tuple[_Path, Any]], Layout]:
    paths = jax.tree.leaves_with_path(state.state())
    return [(_Path(path), leaf) for path, leaf in paths], state.layout


jax.tree_util.register_pytree_with_keys(Leaves, _leaves_with_keys, Leaves, lambda state: (state.leaves, state.layout))


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
    mesh, program = _program(changes, shardings)
    with auto_axes(mesh):
        made = program(arrays)
    return jax.block_until_ready(made) if mesh.devices.flat[0].platform == "cpu" else made


@lru_cache
def _program(changes: tuple[Change, ...], shardings: tuple[Any, ...]) -> tuple[Mesh, Callable[..., list[jax.Array]]]:
    mesh = mesh_of_home(shardings[0].mesh)

    def make(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        return [change(x) for x, change in zip(entered(arrays, mesh), changes, strict=True)]

    return mesh, jax.jit(make, out_shardings=list(shardings))


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
