"""Split an NNX module into plain trees of arrays, and merge them into a module again.

A module is split once, at initialisation, and merged only while a step is traced. `nnx.Param`, and variables that a
filter of nnx (`wrt`) selects, are parameters. `nnx.RngState` is not part of the state: every merge seeds it from the
step's key. All other variables (BatchNorm statistics) and arrays that are plain attributes are model state, which the
step returns changed. Variables that a call adds to the module (`sow`) are dropped, and reported.

Batch norms are synchronised over devices that each see their own rows: `nnx.BatchNorm` with an axis name averages the
devices' means. With a mask, this is the mean over all rows only if every device masks the same number. So sums and
counts are reduced instead (`_Masked`).
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.meta import Partitioned
from flax.linen.spmd import LogicallyPartitioned, logical_to_mesh_axes
from flax.nnx.pytreelib import DATA_REGISTRY
from flax.nnx.spmd import get_var_pspec
from flax.traverse_util import unflatten_dict
from jax.sharding import PartitionSpec

from jdp.base.errors import UserError
from jdp.base.notices import notice
from jdp.base.tree_paths import path_of
from jdp.core.flax_nnx.changes import is_unchanged, structure_of

Flat = dict[tuple[Any, ...], Any]


@dataclass(frozen=True)
class Adapter:
    """A module without its arrays, which a merge adds. Adapters of modules of equal structure are equal."""

    structure: Hashable
    graphdef: nnx.GraphDef[nnx.Module] = field(compare=False, repr=False)
    variables: Flat = field(compare=False, repr=False)  # with shapes in place of arrays
    synchronised: frozenset[str] = frozenset()  # paths of the averages of batch norms
    others: frozenset[tuple[Any, ...]] = frozenset()  # paths of parameters that `wrt` selects and that are no nnx.Param

    def merge(
        self,
        params: Mapping[str, Any],
        model_state: Mapping[str, Any],
        rng: jax.Array | None,
        sync_axes: tuple[str, ...] = (),
        *,
        keep_mode: bool = False,
        running_norms: bool = False,
    ) -> nnx.Module:
        """Build the module, in training mode if there is a key; with `running_norms`, norms use running averages."""
        filled: Flat = {}
        for path, variable in self.variables.items():
            if isinstance(variable, nnx.RngState):
                value = _seeded(variable, rng, len(filled))
            else:
                value = at(params if self.is_parameter(path, variable) else model_state, path)
            filled[path] = with_value(variable, value)
        module = nnx.merge(self.graphdef, nnx.from_flat_state(filled))
        for _, norm in _batch_norms(module):
            if norm.axis_name is not None:
                notice("jdp replaces BatchNorm's axis_name by the axes of the batch")
            norm.axis_name = cast(Any, sync_axes or None)  # None: statistics of the local rows only
            if sync_axes:  # nnx's own setter would add an attribute
                object.__setattr__(norm, "__class__", _masked(type(norm)))
        if rng is None:
            module.eval()
        elif not keep_mode:
            _report_modes(module)
            module.train()
        for _, norm in _batch_norms(module) if running_norms else ():
            norm.use_running_average = True
        return module

    def changed(self, module: nnx.Module) -> dict[str, Any]:
        """Return the model state after the module was called; variables that the call added are dropped."""
        flat = {path: leaf for path, leaf in _flat(module).items() if path not in self.others}
        after = {path: value_of(leaf) for path, leaf in flat.items() if is_model_state(leaf)}
        if added := [path for path in after if path not in self.variables]:
            notice(f"a call of the model adds {'/'.join(map(str, added[0]))}, which is not kept between steps")
        return nested({path: value for path, value in after.items() if path in self.variables})

    def written(self, params: Mapping[str, Any], module: nnx.Module) -> list[tuple[str, Any, Any]]:
        """Return (path, value before, value after) of parameters that a call set, perhaps to the same value."""
        after = {path: leaf for path, leaf in _flat(module).items() if self.is_parameter(path, leaf)}
        pairs = ((p, at(params, p) if p in self.variables else None, value_of(leaf)) for p, leaf in after.items())
        return [("/".join(map(str, path)), old, new) for path, old, new in pairs if not is_unchanged(old, new)]

    def average_in(self, wrt: Any) -> str | None:
        """Return the path of an `nnx.BatchStat` that a filter of nnx selects; None if it selects none."""
        selects = _predicate(() if wrt is None or is_pattern(wrt) else wrt)
        averages = (path for path, leaf in self.variables.items() if isinstance(leaf, nnx.BatchStat))
        return next(("/".join(map(str, path)) for path in averages if selects(path, self.variables[path])), None)

    @property
    def named(self) -> frozenset[str]:
        """Paths of the parameters that only `wrt` makes parameters."""
        return frozenset("/".join(map(str, path)) for path in self.others)

    def is_parameter(self, path: tuple[Any, ...], variable: Any) -> bool:
        return isinstance(variable, nnx.Param) or path in self.others

    @property
    def has_statistics(self) -> bool:
        """Whether calls may change variables that are neither parameters nor random streams, as BatchNorm's do."""
        return any(
            is_model_state(variable) and isinstance(variable, nnx.Variable) and path not in self.others
            for path, variable in self.variables.items()
        )

    @property
    def batch_statistics(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the running averages (`nnx.BatchStat`): a mean and a variance for each batch norm."""
        statistics = [v.get_value() for v in self.variables.values() if isinstance(v, nnx.BatchStat)]
        return tuple(leaf.shape for leaf in jax.tree.leaves(statistics))


def built(init: Callable[[jax.Array], Any], rng: jax.Array) -> tuple[Any, tuple[tuple[str, PartitionSpec], ...]]:
    """Call `init` and read the sharding metadata of its parameters; the current rules translate logical names.

    NNX variables keep their metadata, but the plan shards them. linen's boxes (`nn.Partitioned`) are replaced by their
    values. Traced arrays that are plain attributes are data, as others are: Flax 0.12 does not recognise them.
    """
    traced = type(jnp.zeros(()))  # under `jit`
    with nnx.use_eager_sharding(False), ExitStack() as after:
        DATA_REGISTRY.add(traced)
        after.callback(DATA_REGISTRY.discard, traced)
        model = init(rng)
    if isinstance(model, nnx.Module):
        return model, metadata(model)
    is_box = lambda leaf: isinstance(leaf, Partitioned)  # noqa: E731
    specs: list[tuple[str, PartitionSpec]] = []
    for path, box in jax.tree.leaves_with_path(model, is_leaf=is_box):
        if isinstance(box, LogicallyPartitioned):
            specs.append((path_of(path), logical_to_mesh_axes(box.names, box.rules) or PartitionSpec()))
        elif is_box(box):
            specs.append((path_of(path), box.get_partition_spec()))
    unboxed = jax.tree.map(lambda x: x.value if is_box(x) else x, model, is_leaf=is_box)
    return unboxed, tuple((path, spec) for path, spec in specs if spec)


def metadata(tree: Any) -> tuple[tuple[str, PartitionSpec], ...]:
    """Return (path, spec) for each variable of a module that its metadata shards; () for other trees."""
    specs: list[tuple[str, PartitionSpec]] = []
    for path, variable in _flat(tree).items() if isinstance(tree, nnx.Module) else ():
        spec = (get_var_pspec(variable) if isinstance(variable, nnx.Variable) else None) or PartitionSpec()
        rank = getattr(value_of(variable), "ndim", None)
        if any(spec) and rank is not None:  # None: a tree of arrays
            missing = rank - len(spec)  # after a plain `vmap` over layers the spec is for the last dimensions
            specs.append(("/".join(map(str, path)), PartitionSpec(*(None,) * missing, *spec)))
    return tuple(specs)


def split(model: Any, wrt: Any = None) -> tuple[Any, Any, Adapter | None]:
    """Split a module into (params, model_state, adapter); another pytree gives (itself, {}, None).

    Parameters are its `nnx.Param`, and floating-point variables of other types that `wrt`, a filter of nnx, selects.
    """
    if not isinstance(model, nnx.Module):
        return model, {}, None
    graphdef, tree = nnx.split(model)
    variables: Flat = dict(nnx.to_flat_state(tree))
    others = _others(variables, wrt)
    is_param = {path: isinstance(leaf, nnx.Param) or path in others for path, leaf in variables.items()}
    params = nested({path: value_of(leaf) for path, leaf in variables.items() if is_param[path]})
    state = {path: value_of(leaf) for path, leaf in variables.items() if is_model_state(leaf) and not is_param[path]}
    for path, leaf in ((path, leaf) for path, value in state.items() for leaf in jax.tree.leaves(value)):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
            name, fix = "/".join(map(str, path)), "Make it a plain attribute of the module"
            raise UserError(f"A variable of the model holds arrays; {name} holds {leaf!r}. {fix}.")
    model_state = jax.tree.map(jnp.asarray, nested(state))
    shape = lambda x: jax.typeof(x) if hasattr(x, "dtype") else x  # noqa: E731
    shapes = {path: with_value(leaf, jax.tree.map(shape, value_of(leaf))) for path, leaf in variables.items()}
    averages = ((*path, name) for path, _ in _batch_norms(model) for name in ("mean", "var"))
    synchronised = frozenset("/".join(map(str, path)) for path in averages)
    return params, model_state, Adapter(structure_of(graphdef), graphdef, shapes, synchronised, others)


def matches(adapter: Adapter, paths: Sequence[str], wrt: Any) -> tuple[bool, ...]:
    """Return for each parameter whether an NNX filter selects it."""
    selects = _predicate(wrt)
    selected = {tuple(map(str, path)): bool(selects(path, leaf)) for path, leaf in adapter.variables.items()}
    keys = [tuple(path.split("/")) for path in paths]  # a variable may hold a tree, whose leaves have longer paths
    return tuple(next(selected[k[:n]] for n in range(len(k), 0, -1) if k[:n] in selected) for k in keys)


def _predicate(wrt: Any) -> Callable[[tuple[Any, ...], Any], bool]:
    try:
        return nnx.filterlib.to_predicate(wrt)
    except (TypeError, ValueError) as error:
        raise UserError(
            "`wrt` is None, a path pattern or a sequence of them ('head/*'), or a filter of nnx (nnx.LoRAParam); given "
            f"{wrt!r}. Give None to train everything."
        ) from error


def is_pattern(wrt: Any) -> bool:
    """Return True for a path pattern or a sequence of them; False for a filter of nnx."""
    return isinstance(wrt, str) or (isinstance(wrt, Sequence) and all(isinstance(entry, str) for entry in wrt))


def _others(variables: Flat, wrt: Any) -> frozenset[tuple[Any, ...]]:
    """Return the paths of floating-point variables, neither `nnx.Param` nor averages, that a filter selects."""
    if wrt is None or is_pattern(wrt):
        return frozenset()
    selects = _predicate(wrt)

    def is_other(path: tuple[Any, ...], leaf: Any) -> bool:
        if isinstance(leaf, nnx.Param | nnx.RngState | nnx.BatchStat) or not selects(path, leaf):
            return False
        dtypes = [getattr(x, "dtype", None) for x in jax.tree.leaves(value_of(leaf))]
        return bool(dtypes) and all(x is not None and jnp.issubdtype(x, jnp.floating) for x in dtypes)

    return frozenset(path for path, leaf in variables.items() if is_other(path, leaf))


def _flat(module: nnx.Module) -> Flat:
    return dict(nnx.to_flat_state(nnx.split(module)[1]))


def value_of(leaf: Any) -> Any:
    """Return the array of a variable, or an array that is a plain attribute."""
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def is_model_state(variable: Any) -> bool:
    """Return True for a variable that is neither a parameter nor a random stream."""
    return not isinstance(variable, nnx.RngState | nnx.Param)


def _batch_norms(module: nnx.Module) -> list[tuple[tuple[Any, ...], nnx.BatchNorm]]:
    return [(path, node) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.BatchNorm)]


def _report_modes(module: nnx.Module) -> None:
    """Report a module that `init` put into evaluation mode, such as a frozen backbone's batch norm."""
    for path, node in nnx.iter_graph(module):
        if True in (getattr(node, "deterministic", None), getattr(node, "use_running_average", None)):
            notice(
                f"a train step puts {'/'.join(map(str, path)) or 'the model'} into training mode, although it was made "
                "in evaluation mode; to keep it there, call its .eval() in the loss"
            )
            return


def _seeded(variable: Any, rng: jax.Array | None, index: int) -> jax.Array:
    """Return a new key or a zero counter for an RNG variable; in evaluation mode nothing draws from the key."""
    aval = variable.get_value()
    if not jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.zeros(aval.shape, aval.dtype)
    key = jax.random.fold_in(jax.random.key(0) if rng is None else rng, index)
    if not aval.shape:
        return key
    each = jnp.arange(math.prod(aval.shape))
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(each).reshape(aval.shape)


def at(tree: Mapping[str, Any], path: tuple[Any, ...]) -> Any:
    """Return the value at a path in nested dicts with text keys, as `nested` makes them."""
    return reduce(lambda value, key: value[str(key)], path, cast(Any, tree))


def with_value(leaf: Any, value: Any) -> Any:
    """Return a variable with another value; for an array that is a plain attribute the value itself."""
    return leaf.replace(value) if isinstance(leaf, nnx.Variable) else value


def nested(flat: Flat) -> dict[str, Any]:
    """Return values by path as nested dicts with text keys."""
    return unflatten_dict({tuple(map(str, path)): value for path, value in flat.items()})


class _Masked(nnx.BatchNorm):
    """nnx.BatchNorm whose statistics with a mask are those of all devices' rows together."""

    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: jax.Array | None = None
    ) -> jax.Array:
        running = self.use_running_average if use_running_average is None else use_running_average
        if mask is None or running or running is None:
            return super().__call__(x, use_running_average, mask=mask)
        scale, bias = (None if v is None else v[...] for v in (self.scale, self.bias))
        x, mean, _, scale, bias = self.promote_dtype((x, self.mean[...], self.var[...], scale, bias), dtype=self.dtype)
        features = {dim % x.ndim for dim in (self.axis if isinstance(self.axis, tuple) else (self.axis,))}
        mean, var = self._statistics(x, tuple(dim for dim in range(x.ndim) if dim not in features), mask)
        for average, new in ((self.mean, mean), (self.var, var)):
            average[...] = self.momentum * average[...] + (1 - self.momentum) * new
        shape = [size if dim in features else 1 for dim, size in enumerate(x.shape)]
        factor = jax.lax.rsqrt(var + self.epsilon).reshape(shape)
        y = (x - mean.reshape(shape)) * (factor if scale is None else factor * scale.reshape(shape))
        return (y if bias is None else y + bias.reshape(shape)).astype(x.dtype)

    def _statistics(self, x: jax.Array, dims: tuple[int, ...], mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return mean and variance over `dims` of the unmasked elements, in float32 or wider; NaN if all are masked."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mask = mask.reshape((1,) * (x.ndim - mask.ndim) + mask.shape)
        counted = jnp.broadcast_to(mask, [x.shape[i] if i in dims else size for i, size in enumerate(mask.shape)])
        count = jnp.sum(counted, axis=dims, dtype=wide.dtype)  # one number, unless features have masks of their own

        def means(*terms: jax.Array) -> list[jax.Array]:
            sums = jnp.stack([jnp.sum(term, axis=dims, where=counted) for term in terms])
            total = jnp.concatenate([sums.ravel(), count.ravel()])  # one small collective
            total = jax.lax.psum(total, self.axis_name, axis_index_groups=self.axis_index_groups)
            return list(total[: sums.size].reshape(sums.shape) / total[sums.size :].reshape(count.shape))

        if self.use_fast_variance:
            mean, square = means(wide, jnp.square(wide))
            return mean, jnp.maximum(square - jnp.square(mean), 0.0)
        [mean] = means(wide)
        [var] = means(jnp.square(wide - jnp.expand_dims(mean, dims)))
        return mean, var


@cache
def _masked(kind: type[nnx.BatchNorm]) -> type[nnx.BatchNorm]:
    """Return a class with `_Masked` between `kind` and nnx.BatchNorm, so that `super()` in a subclass finds it."""
    if issubclass(_Masked, kind):
        return _Masked
    return cast(Any, type(kind.__name__, (cast(Any, kind), _Masked), {}))
