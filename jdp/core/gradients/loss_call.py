"""One call of the user's loss function, as the gradient code sees it.

Its operands are gathered weights, or shards that are gathered in the call. Its result is always `Sums`, even if the
user's function returned a scalar.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import and_
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import Jaxpr
from jax.interpreters import partial_eval

from jdp.base.errors import UserError
from jdp.base.tree_paths import path_in_model, path_of
from jdp.core.batch import batch_rows
from jdp.core.gather_rows import recording
from jdp.core.gradients.boundary import Boundary, GatherTable, Weight, current_trace, gathering
from jdp.core.precision import Precision
from jdp.core.reading import AT_TOP, passed_on
from jdp.core.state import AnyState
from jdp.core.types import Batch, Loss, LossFn, PartsError, PyTree

RESERVED = frozenset(("loss", "weight", "grad_norm", "skipped"))


def check_loss_takes(loss_fn: Any, arguments: int) -> None:
    """Check that a loss can be called with models, a batch and a key, by position."""
    takes = ", ".join([*(f"model_{i}" if arguments > 3 else "model" for i in range(arguments - 2)), "batch", "rng"])
    rule, fix = f"A loss is a function of ({takes})", f"Write def loss_fn({takes})"
    if not callable(loss_fn):
        raise UserError(f"{rule}; given {loss_fn!r}. {fix}.")
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # of a function that is not written in Python
        return
    try:
        signature.bind(*range(arguments))
    except TypeError:
        name = getattr(inspect.unwrap(loss_fn), "__name__", type(loss_fn).__name__)
        raise UserError(f"{rule}, called by position; given {name}{signature}. {fix}.") from None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """Sums over examples: float32 scalars; metrics are float32 arrays: (total,), or (total, weight) of its own."""

    total: jax.Array
    weight: jax.Array
    metrics: dict[str, tuple[jax.Array, ...]]
    aux: list[jax.Array] = field(default_factory=list[Any])  # the arrays of a `LossWithAux`, which are not summed

    @property
    def only(self) -> Sums:
        """The sums without `aux`."""
        return Sums(self.total, self.weight, self.metrics)


@dataclass(frozen=True)
class LossWithAux:
    """A loss that returns (loss, aux). A call of this object returns the loss alone, as the trial needs it."""

    fn: Any  # the user's loss function, of (models, batch, rng)
    by_row: tuple[bool, ...] | None = None  # for each array of aux, whether it has a row for each example; None: no aux
    structure: Any = None  # of aux, as a pytree

    def __call__(self, model: Any, batch: Batch, rng: Any) -> tuple[Any, PyTree]:
        value = self.fn(model, batch, rng)
        if not isinstance(value, tuple) or len(value) != 2:
            raise UserError(
                f"With has_aux=True a loss returns a pair (loss, aux); given {type(value).__name__}. Write "
                "`return jdp.Loss(total, weight), aux`."
            )
        for path, leaf in jax.tree.leaves_with_path(value[1]):
            if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
                name = jax.tree_util.keystr(path) or "it"
                raise UserError(f"aux is a pytree of arrays; {name} is {leaf!r}. Leave out everything else.")
        return value


@dataclass(frozen=True)
class LossForm:
    """The form of a loss' result, read from one trace on shapes alone."""

    is_scalar: bool  # not a `Loss`
    gathers_rows: bool  # it calls `jdp.gather_rows`
    metrics: dict[str, tuple[int, ...]]  # the shapes of its metrics' totals, by name
    aux: PyTree  # the shapes of its aux; () without `has_aux`
    weight: float | None  # `Loss.weight`, if it depends on shapes alone
    statistics: tuple[str, ...] = ()  # paths of model state, except batch norms' averages, that a training call changes
    is_averaged: bool = False  # the first is floating point, so the devices' values can be averaged


def with_outputs(loss: LossWithAux, form: LossForm, larger: LossForm | None, rows: int) -> LossWithAux:
    """Return a loss that returns its aux too, each array marked as rows or not.

    `form` is the loss on `rows` rows. If it is called on parts of the batch, `larger` is its form on twice as many, and
    an array of aux without the rows raises PartsError.
    """
    arrays = jax.tree.leaves_with_path(form.aux)
    for (path, few), many in zip(arrays, jax.tree.leaves(larger.aux), strict=True) if larger is not None else ():
        if few.shape[:1] != (rows,) or many.shape != (2 * rows, *few.shape[1:]):
            name = f"aux[{path_of(path)!r}]" if path else "aux"
            raise PartsError(
                f"each array of aux has the rows as its first dimension; given {name}, {list(few.shape)} for {rows} "
                f"rows and {list(many.shape)} for {2 * rows}: return sums as metrics of jdp.Loss, keep statistics in "
                "the model"
            )
    by_row = tuple(few.shape[:1] == (rows,) for _, few in arrays)
    return replace(loss, by_row=by_row, structure=jax.tree.structure(form.aux))


@dataclass(frozen=True)
class TracedLoss:
    """The user's loss function, how parameters become its model, and how they are sharded."""

    fn: LossFn
    adapter: Any  # as in `jdp.core.state.Static`
    placements: PyTree  # a tree like the parameters, of `Placement`
    boundary: Boundary | None  # gathers weights and sums their gradients; None if the operands are gathered already
    sync_axes: tuple[str, ...] = ()  # mesh axes over which batch norms compute statistics, beside the rows of the call
    running_norms: bool = False  # batch norms use their running averages in training mode too

    def __call__(self, operands: PyTree, model_state: PyTree, batch: Batch, key: Any) -> tuple[Sums, PyTree]:
        """Return the sums over the rows of `batch`, and the model state afterwards."""
        value, aux, model_state, _ = self.value(operands, model_state, batch, key)
        with_aux = isinstance(self.fn, LossWithAux) and self.fn.by_row is not None
        arrays = list(map(jnp.asarray, jax.tree.leaves(aux))) if with_aux else []
        return replace(as_sums(value, batch), aux=arrays), model_state

    def value(self, operands: PyTree, model_state: PyTree, batch: Batch, key: Any) -> tuple[Any, PyTree, PyTree, Any]:
        """Return the loss function's result, its aux, and the model state and the model afterwards."""
        weights, context = operands, contextlib.nullcontext()
        if (boundary := self.boundary) is not None:
            placements, tree = jax.tree.flatten(self.placements)
            sources = [x if isinstance(x, Weight) else Weight(x) for x in tree.flatten_up_to(operands)]
            with jax.named_scope(AT_TOP):
                weights = tree.unflatten(map(boundary, sources, placements))
            leaves: Any = zip(jax.tree.leaves(weights), sources, placements, strict=True)
            table = {id(leaf): (leaf, *source) for leaf, *source in leaves}
            context = gathering(GatherTable(boundary, table, current_trace()))
        with context:
            model = weights
            if self.adapter is not None:
                model = self.adapter.merge(weights, model_state, key, self.sync_axes, running_norms=self.running_norms)
            value = self.fn(model, batch, key)
            value, aux = value if isinstance(self.fn, LossWithAux) else (value, ())
            if self.adapter is not None:
                model_state = self.adapter.changed(model)
        return value, aux, model_state, model


def trace_loss(
    fn: LossFn,
    precision: Precision,
    state: AnyState,
    batch: Batch,
    rows: int,
    *,
    key: Any,
    within: Callable[[Any], Any] = lambda call: call,
) -> tuple[Jaxpr, LossForm]:
    """Trace one call of a loss on `rows` rows shaped like the batch's; nothing is computed.

    A training call that writes a parameter is refused, because the step would drop the new value. `key` is None for an
    evaluation. `within` wraps the call, for example in a `shard_map`.
    """
    batch_size, forms, adapter = batch_rows(batch), list[LossForm](), state.static.adapter

    def fewer(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows * leaf.shape[0] // batch_size, *leaf.shape[1:]), traced_dtype(leaf))

    def call(params: PyTree, model_state: PyTree, batch: Batch, key: Any) -> Any:
        with recording() as gathered:
            value, aux, after, model = TracedLoss(fn, adapter, None, None).value(params, model_state, batch, key)
        set_params, set_state = dict[str, Any](), dict[str, Any]()  # path -> (arrays before, arrays after)
        if adapter is not None and key is not None:
            set_params = {name: tuple(map(jax.tree.leaves, pair)) for name, *pair in adapter.written(params, model)}
            pairs = zip(jax.tree.leaves(model_state), jax.tree.leaves(after), strict=True)
            set_state = {name: ([x], [y]) for name, (x, y) in zip(names_of(model_state), pairs, strict=True)}
        sums = as_sums(value, batch)
        dtype = jnp.result_type(value.total if isinstance(value, Loss) else value)
        if key is not None and not jnp.issubdtype(dtype, jnp.floating):
            rule = "A loss that is trained is a floating-point number;"
            raise UserError(f"{rule} given {dtype}, which has no gradient. Return a sum that depends on the weights.")
        shapes = {name: total.shape for name, (total, *_) in sums.metrics.items()}
        aux = jax.tree.map(jnp.asarray, aux)
        weight = getattr(value, "weight", None)
        if isinstance(weight, Tracer):
            weight = weight.get_const() if hasattr(weight, "get_const") else None  # of jnp.float32(16), a number
        known = None if weight is None else float(weight)
        forms.append(LossForm(not isinstance(value, Loss), bool(gathered), shapes, jax.tree.map(shape_of, aux), known))
        return sums, aux, after, set_params, set_state

    jaxpr, shapes = jax.make_jaxpr(within(call), return_shape=True)(
        precision.working_shapes(state.params),
        jax.tree.map(shape_of, state.model_state),
        jax.tree.map(fewer, batch),
        None if key is None else shape_of(key),
    )
    *_, set_params, set_state = jax.tree.unflatten(jax.tree.structure(shapes), passed_on(jaxpr.jaxpr))
    if written := [name for name, pair in set_params.items() if pair[0] != pair[1]]:
        raise UserError(_written(written[0], adapter))
    changed = [name for name, pair in set_state.items() if pair[0] != pair[1] and name not in adapter.synchronised]
    averaged = [name for name in changed if jnp.issubdtype(shapes[-1][name][1][0].dtype, jnp.inexact)]
    return jaxpr.jaxpr, replace(forms[-1], statistics=(*averaged, *changed), is_averaged=bool(averaged))


def _written(path: str, adapter: Any) -> str:
    rule = "A parameter is changed by the optimizer alone;"
    if path in adapter.named:
        return f"{rule} `wrt` selects {path}, which a call writes. Name the trained types: wrt=(nnx.Param, ...)."
    return (
        f"{rule} given a call of the model that writes {path}, an nnx.Param. Initialise it by a call in `init`; or, as "
        "nnx.SpectralNorm and WeightNorm need, set it back: kernel = layer.kernel[...] before the call of the norm, "
        "layer.kernel.set_value(kernel) after it."
    )


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return an array's shape and dtype, without its sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def traced_dtype(leaf: Any) -> Any:
    """Return the dtype of an array in a traced function: NumPy's int64 becomes int32."""
    return jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)


def as_sums(value: Any, batch: Batch) -> Sums:
    """Return a loss function's result as sums; a plain scalar is the mean over the batch's rows."""
    if not isinstance(value, Loss):
        rule = "A loss function returns jdp.Loss(total, weight, metrics) or a scalar, the mean over the batch's rows;"
        if not hasattr(value, "dtype") and not isinstance(value, int | float):
            fix = "Return sums over examples as metrics, and anything else by jdp.value_and_grad(..., has_aux=True)"
            raise UserError(f"{rule} given {type(value).__name__}. {fix}.")
        if shape := jnp.shape(value):
            fix = "Return its .mean(), or jdp.Loss(total=loss.sum(), weight=loss.size)"
            raise UserError(f"{rule} given an array of shape {shape}. {fix}.")
        value = _scalar("a loss function's plain return value", value)
        rows = jnp.float32(batch_rows(batch))
        return Sums(value * rows, rows, {})
    if taken := RESERVED.union(f"{name}_weight" for name in value.metrics) & value.metrics.keys():
        names = ", ".join(sorted(RESERVED))
        raise UserError(f"A step reports {names} and NAME_weight itself; rename the metric {min(taken)!r}.")
    metrics = {name: _metric(name, entry) for name, entry in value.metrics.items()}
    return Sums(_scalar("Loss.total", value.total), _scalar("Loss.weight", value.weight), metrics)


def _metric(name: str, entry: Any) -> tuple[jax.Array, ...]:
    """Return a metric's total, and its weight if it has one: a scalar, or of the total's shape."""
    pair: Any = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry,)
    if not all(hasattr(part, "dtype") or isinstance(part, int | float) for part in pair):
        raise UserError(
            f"A metric is an array summed over examples, or a pair (array, weight); given metric {name!r} of "
            f"{type(entry).__name__}. Give several metrics several names."
        )
    total, *own = (jnp.asarray(part).astype(jnp.float32) for part in pair)
    if own and own[0].shape not in ((), total.shape):
        raise UserError(
            f"A metric's weight is a scalar, or has the shape of its total; metric {name!r} has shapes {total.shape} "
            f"and {own[0].shape}. Sum both over the batch."
        )
    return total, *own


def _scalar(name: str, value: Any) -> jax.Array:
    array = jnp.asarray(value)
    if array.shape:
        raise UserError(f"{name} must be a scalar; its shape is {array.shape}. Sum it over the batch.")
    return array.astype(jnp.float32)


def changed_leaves(before: PyTree, after: PyTree) -> tuple[bool, ...]:
    """Return for each leaf, in order, whether it is another array than before."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return tuple(old is not new for old, new in pairs)


def names_of(model_state: PyTree) -> list[str]:
    """Return the path of each leaf, in order; for several models `model_state` is a tuple."""
    leaves = jax.tree.leaves_with_path(model_state)
    if not isinstance(model_state, tuple):
        return [path_of(path) for path, _ in leaves]
    return [path_in_model(path[0].idx, len(model_state), path_of(path[1:])) for path, _ in leaves]


def refuse_varying(
    call: Callable[..., tuple[Sums, PyTree]], model_state: PyTree, batch: Batch, key: PyTree, *, carried: bool
) -> None:
    """Refuse model state that is not floating point and would differ between devices."""
    leaves = jax.tree.leaves(model_state)
    fixed = [not jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    if not any(fixed):
        return
    jaxpr = jax.make_jaxpr(lambda *given: call(*given)[1])(model_state, batch, key).jaxpr
    needs = [partial_eval.dce_jaxpr(jaxpr, [i == j for j in range(len(leaves))])[1] for i in range(len(leaves))]
    varies = [any(used[len(leaves) :]) for used in needs]
    for _ in leaves if carried else ():  # after one microbatch, after two, ...
        varies = [v or any(map(and_, used, varies)) for v, used in zip(varies, needs, strict=True)]
    for name, leaf, is_fixed, is_varying in zip(names_of(model_state), leaves, fixed, varies, strict=True):
        if is_fixed and is_varying:
            raise UserError(
                f"Under partitioning='manual' {name} ({leaf.dtype}) would depend on each device's rows and differ "
                "between devices; only floating-point state is averaged. Use partitioning='auto', which sees the whole "
                "batch, or keep it in floating point."
            )


def mean_over(x: jax.Array, axes: tuple[str, ...], devices: int) -> jax.Array:
    """Return the mean of the devices' `x` along mesh axes, in x's dtype, computed in float32 or wider.

    Values are first divided by a power of two above the number of devices, which is exact, so that no sum of finite
    values overflows. A mean that rounds up beyond `finfo.max` is clipped to it.
    """
    wide, scale = jnp.promote_types(x.dtype, jnp.float32), 2 ** devices.bit_length()
    mean = jax.lax.psum(x.astype(wide) / scale, axes) / devices
    largest = jnp.asarray(jnp.finfo(x.dtype).max, wide) / scale
    return (scale * jnp.where(jnp.isfinite(mean), jnp.clip(mean, -largest, largest), mean)).astype(x.dtype)
