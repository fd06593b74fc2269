"""The gradient of a loss by a plan, for a training loop of the user's own: `jdp.value_and_grad`.

Each call joins its models into one tree of parameters, and freezes the models that are not differentiated. Everything
else is as in a step (`PartitionedLoss`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Generic, TypeVarTuple, cast

import jax
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jdp.base.errors import UserError, public
from jdp.base.notices import notice
from jdp.base.toml import described
from jdp.base.tree_paths import path_in_model
from jdp.base.words import Encoding, Partitioning, PrecisionName, is_integer
from jdp.core import flax_nnx
from jdp.core.batch import check_operands, owned, signature
from jdp.core.gradients.loss_call import LossWithAux, check_loss_takes
from jdp.core.gradients.partitioned_loss import PartitionedLoss, means, read_only
from jdp.core.init.trees import check_tree, refuse_offload, resolve, typed_key
from jdp.core.plan import Plan, check_plan
from jdp.core.precision import Precision
from jdp.core.sharding.mesh import followed, tracing_on
from jdp.core.state import AnyState, Models, Static, TrainState, trained_part
from jdp.core.step_settings import StepSettings
from jdp.core.types import Batch, PyTree

Arguments = TypeVarTuple("Arguments")


@public()
def value_and_grad(
    loss_fn: Callable[[*Arguments], Any],
    plan: Plan,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    wrt: Any = None,
    accumulate: int = 1,
    precision: PrecisionName | Precision = "fp32",
    partitioning: Partitioning | None = None,
    wire: Encoding | None = None,
    check_loss: bool = True,
) -> ValueAndGrad[*Arguments]:
    """Make `gradient(*models, batch, rng) -> (metrics, gradients)`, to call in a jitted function of your own.

        >>> model = jdp.init(init, plan, rng=jax.random.key(0))
        >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        >>> gradient = jdp.value_and_grad(loss_fn, plan)
        >>> @nnx.jit
        ... def step(model, optimizer, batch, rng):
        ...     metrics, grads = gradient(model, batch, rng)
        ...     optimizer.update(model, grads)
        ...     return metrics
        >>> sorted(step(model, optimizer, batch, jax.random.key(1)))
        ['loss', 'weight']

    Call it under `jax.jit` or `nnx.jit`, in a `jax.lax.scan`, or beside other such gradients. Outside of `jit` it
    compiles its own computation, and several processes are compared as before a training step. Inside a jitted function
    a loss is tried on drawn values; `check` tries it on real values.
    Gradients have the rest shardings of the parameters, and so has the result of an optimizer's update. XLA may leave
    an updated model gathered if the same function uses it in other ways: return `jdp.place(model, plan)`.

    Args:
        loss_fn: `loss_fn(*models, batch, rng)` -> `Loss`, or a scalar, the loss of all rows. A model is an
            `nnx.Module`, or any pytree of arrays, sharded by `jdp.init` or `jdp.place`. The loss gets it in the compute
            dtype, gathered as the strategy says. Modules keep their mode (`train()`, `eval()`), and draw from `rng`,
            not from their own streams.
        plan: the mesh and the strategy, of all models.
        argnums: the numbers of the models that are differentiated; give several when one loss trains several models.
            The other models are only read, and sharded alike at rest.
        has_aux: True when you need arrays beside the loss, such as logits. The loss returns a pair (loss, aux), aux a
            pytree of arrays, and the gradient `((metrics, aux), gradients)`. An array whose first dimension is the rows
            comes back for all rows, in the order of the batch, sharded over them. If an array has no rows, the loss is
            called once, on all rows, which needs accumulate=1. Return sums over rows in `Loss.metrics`.
        wrt: the parameters of the differentiated model that are trained, as for `jdp.init_state`; None: all. Give path
            patterns ("head/*"), or for a module a filter of nnx, to train a part. It needs one differentiated model.
        accumulate, precision, partitioning, check_loss: as for `jdp.make_train_step`.
        wire: as for `jdp.make_train_step`. Rounding is drawn from `rng`, and unbiased if each call gets another key.

    Returns:
        A `ValueAndGrad`. Metrics are global float32: `loss` (Σtotal / Σweight), `weight` and the loss function's own.
        Gradients are Σ∇total / Σweight over all devices and microbatches, at rest specs, in the parameters' dtype. They
        are one tree if `argnums` is a number, else a tuple of trees; for a module an `nnx.State`, as of `nnx.grad`;
        with `wrt`, None for frozen parameters. Changes that a call makes in modules (batch statistics) are written back
        into them. A weight of 0 gives NaN: your step decides what to do then.

    Raises:
        ValueError: a setting is out of range. The call itself raises it as `jdp.make_train_step` lists, and inside a
            `jax.shard_map` over the plan's axes. Outside of jit also for models that are sharded otherwise or donated.
    """
    check_plan(plan, "jdp.value_and_grad(loss_fn, plan)", loss_fn)
    refuse_offload(plan)
    numbers = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    if not numbers or not all(is_integer(n) and n >= 0 for n in numbers) or len(set(numbers)) < len(numbers):
        rule = "argnums is the number of a model, from 0, or several different numbers"
        raise UserError(f"{rule}; given {argnums!r}. Write 0, or (0, 1).")
    if wrt is not None and len(numbers) > 1:
        fix = "Make a gradient for each model, or pass frozen parameters as another model"
        raise UserError(f"wrt selects parameters of one model; given argnums={numbers}. {fix}.")
    if flax_nnx.is_module(loss_fn) or not callable(loss_fn):
        check_loss_takes(loss_fn, 3)
    settings = StepSettings(
        precision=Precision.of(precision),
        requested=partitioning,
        accumulate=accumulate,
        wire=wire,
        check_loss=check_loss,
    )

    @wraps(loss_fn, assigned=(), updated=())
    def loss_of_models(models: Any, batch: Batch, rng: Any) -> Any:
        return cast("Any", loss_fn)(*models, batch, rng)

    loss = LossWithAux(loss_of_models) if has_aux else loss_of_models
    return ValueAndGrad(
        PartitionedLoss(loss, plan, settings, "gradient", _models_placements),
        numbers if isinstance(argnums, Sequence) else int(argnums),
        wrt,
    )


def _check_call(gradient: ValueAndGrad[Any], *arguments: Any) -> None:
    """Explain a call that failed, if its arguments are the cause: other errors would name jdp's internals."""
    rule, fix = "A gradient takes models, a batch and a key", "Call it as gradient(model, batch, rng)"
    argnums, loss_fn = gradient.argnums, gradient.loss.loss_fn
    if len(arguments) < 3 + (argnums if isinstance(argnums, int) else max(argnums)):
        raise UserError(f"{rule}; given {len(arguments)} arguments, with {argnums=}. {fix}.")
    check_loss_takes(loss_fn.fn if isinstance(loss_fn, LossWithAux) else loss_fn, len(arguments))
    *models, batch, rng = arguments
    wrong = [model for model in models if isinstance(model, TrainState) or flax_nnx.is_optimizer(model)]
    if wrong or flax_nnx.is_module(batch):
        given = f"{described(wrong[0])} as a model" if wrong else f"{described(batch)} as the batch"
        raise UserError(f"{rule}, in this order; given {given}. {fix}.")
    typed_key(rng)
    check_operands(gradient.plan.mesh, batch)


class ValueAndGrad(Generic[*Arguments]):
    """A gradient: call it as `gradient(*models, batch, rng)`. `jdp.value_and_grad` makes one.

        >>> gradient = jdp.value_and_grad(loss_fn, plan)
        >>> model = jdp.init(init, plan, rng=jax.random.key(0))
        >>> gradient.check(model, batch, jax.random.key(1))  # once, outside of jit: is the loss a sum over rows?
        >>> metrics, grads = gradient(model, batch, jax.random.key(1))
        >>> grads["kernel"][...].sharding.spec
        P('data',)

    Attributes:
        loss: the loss on the plan, which chooses the partitioning and computes gradients.
        argnums: the numbers of the models that are differentiated.
        wrt: which of their parameters are trained; None: all.
        plan: the mesh and the strategy.
        settings: the keywords of `value_and_grad`.
        partitioning: "auto" or "manual"; None before the loss was traced.
        why: the reason for it, one sentence.
    """

    __slots__ = ("__weakref__", "_checked_forms", "_numbers", "_on_meshes", "argnums", "loss", "wrt")

    plan: Plan = read_only("loss.plan")
    settings: StepSettings = read_only("loss.settings")
    partitioning: Partitioning | None = read_only("loss.partitioning")
    why: str = read_only("loss.why")

    def __init__(self, loss: PartitionedLoss, argnums: int | tuple[int, ...], wrt: Any) -> None:
        self.loss, self.argnums, self.wrt = loss, argnums, wrt
        self._numbers = (argnums,) if isinstance(argnums, int) else argnums
        self._on_meshes: dict[Any, ValueAndGrad[*Arguments]] = {}
        self._checked_forms: set[Any] = set()  # of models that follow the plan

    def __repr__(self) -> str:
        return f"ValueAndGrad({self.loss.loss_fn!r}, {self.plan!r}, {self.settings!r}, argnums={self.argnums!r})"

    @public(_check_call)
    def __call__(self, *arguments: *Arguments) -> tuple[Any, Any]:
        loss, plan = self.loss, self.loss.plan
        if (mesh := followed(plan.mesh)) is not plan.mesh:
            if mesh not in self._on_meshes:
                self._on_meshes[mesh] = ValueAndGrad(loss.under(plan.on(mesh)), self.argnums, self.wrt)
            return self._on_meshes[mesh](*arguments)
        *models, batch, rng = cast("tuple[Any, ...]", arguments)
        state = self._joined(models, rng)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((state, batch))):
            self._check_traced(state)
            values, grads, model_state = self._compute(state, batch)
            if not isinstance(rng, Tracer) and (self.settings.wire is not None or self.loss.is_random):
                notice(
                    "a jitted function closes over the key of a gradient, so each call draws the same numbers: pass it "
                    "a key as an argument, such as jax.random.fold_in(key, step)"
                )
            return values, self._taken_apart(models, state, grads, model_state)
        self._check_models(state)
        if loss.is_of_several:
            shapes = signature((state, batch))
            loss.agree(shapes, state, batch, lambda: self.jitted.lower(state, batch))
        elif not loss.is_checked:
            loss.check_first(state, batch)
        values, grads, model_state = self.jitted(state, jax.tree.map(owned, batch))
        loss.limit_run_ahead(values if isinstance(values, dict) else values[0])
        return values, self._taken_apart(models, state, grads, model_state)

    @public(_check_call)
    def check(self, *arguments: *Arguments) -> None:
        """Try on a few rows, outside of jit, whether the loss is a sum over rows, if it is called on parts of a batch.

        Args:
            arguments: those of the call itself, with real values.

        Raises:
            ValueError: the loss must be a sum over rows and is not; or for the reasons that the call lists.
        """
        *models, batch, rng = cast("tuple[Any, ...]", arguments)
        state = self._joined(models, rng)
        self._check_models(state)
        self.loss.check_first(state, batch)

    @property
    def jitted(self) -> Any:
        """`(joined models, batch) -> (metrics, gradients, model state)`, compiled, for calls outside of jit."""
        compiled = self.loss.compiled
        if "gradient" not in compiled:
            compiled["gradient"] = jax.jit(self._compute)
        return compiled["gradient"]

    def _compute(self, state: Models, batch: Batch) -> tuple[Any, PyTree, PyTree]:
        keep, plan, states = jax.lax.with_sharding_constraint, self.loss.plan, state.model_state

        def changed(state: jax.Array, before: jax.Array, after: jax.Array) -> jax.Array:
            return state if before is after else keep(after, plan.replicated)

        with tracing_on(plan.mesh):
            # Without this, a model that the same jitted function updates would be gathered there, and stay gathered.
            placements = self.loss.param_placements(state)
            rest = jax.tree.map(lambda placement: NamedSharding(plan.mesh, placement.rest), placements)
            state = replace(state, params=jax.tree.map(keep, state.params, rest))
            grads, sums, model_state = self.loss.gradients(state, batch, state.rng)
            trained = trained_part(state.params, state.static.trained)
            grads = optax.tree.cast_like(grads, trained)
            model_state = jax.tree.map(changed, states, state.model_state, model_state)
            values = means(sums)
            if isinstance(loss_fn := self.loss.view(state, batch).loss_fn, LossWithAux):
                values = values, loss_fn.structure.unflatten(sums.aux)
            return values, grads, model_state

    def _joined(self, models: Sequence[Any], rng: jax.Array) -> Models:
        """Return all models as one state: tuples of parameters and model state, with an entry for each model."""
        for model in models:
            check_tree(model, arrays=True)
        if (path := flax_nnx.shared(models)) is not None:
            raise UserError(
                f"The models of a gradient share no variables; given two that share {path}. Make one module of both: "
                "pair = nnx.Dict(first=..., second=...), jdp.place(pair, plan), and a loss of (pair, batch, rng)."
            )
        chosen = [self.wrt if number in self._numbers else None for number in range(len(models))]
        parts = [flax_nnx.split(*pair) for pair in zip(models, chosen, strict=True)]
        adapter = flax_nnx.Models(tuple(part[2] for part in parts), tuple(flax_nnx.metadata(model) for model in models))
        trained: list[bool] = []
        for number, (params, _, own) in enumerate(parts):
            if number in self._numbers and own and (path := own.average_in(self.wrt)):
                raise UserError(
                    f"A statistic has no gradient; `wrt` selects {path}, an nnx.BatchStat. Name the types that are "
                    "trained, here and in nnx.Optimizer: wrt=(nnx.Param, ...)."
                )
            count = len(jax.tree.leaves(params))
            selected = resolve(params, own, self.wrt) if number in self._numbers else (False,) * count
            trained += (True,) * count if selected is None else selected
        static = Static(None, adapter, (), None if all(trained) else tuple(trained))  # pyright: ignore[reportArgumentType]
        return Models(tuple(part[0] for part in parts), tuple(part[1] for part in parts), typed_key(rng), static)

    def _taken_apart(self, models: Sequence[Any], state: Models, grads: Any, model_state: Any) -> Any:
        """Write the changes of the call into the modules, and return the gradients in the user's form."""
        adapters = state.static.adapter.adapters
        if jax.tree.leaves(model_state):
            for model, adapter, before, after in zip(models, adapters, state.model_state, model_state, strict=True):
                if adapter is not None:
                    flax_nnx.write_back(model, adapter, before, after)

        def gradients_of(number: int) -> Any:
            adapter = adapters[number]
            return grads[number] if adapter is None else flax_nnx.gradient_state(adapter, grads[number])

        return gradients_of(self.argnums) if isinstance(self.argnums, int) else tuple(map(gradients_of, self.argnums))

    def _check_models(self, state: Models) -> None:
        leaves, tree = jax.tree.flatten(state.params)
        form = tree, tuple([(leaf.shape, leaf.dtype, getattr(leaf, "sharding", None)) for leaf in leaves])
        is_deleted = any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves)
        if form in self._checked_forms and not is_deleted:
            return
        for leaf, placement in zip(leaves, jax.tree.leaves(self.loss.param_placements(state)), strict=True):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise UserError(
                    f"A model must hold its arrays; {placement.path} was donated to a jitted function. Continue with "
                    "the model that it returned."
                )
            rest = self.plan.rest_sharding(placement)
            if not isinstance(leaf, jax.Array) or not leaf.sharding.is_equivalent_to(rest, leaf.ndim):
                given = leaf.sharding if isinstance(leaf, jax.Array) else "a NumPy array"
                raise UserError(
                    f"Models of a gradient have the shardings of its plan ({self.plan}), {rest.spec} for "
                    f"{placement.path}; given {given}. Move it once: model = jdp.place(model, plan)."
                )
        self._checked_forms.add(form)

    def _check_traced(self, state: Models) -> None:
        if manual := {*jax.sharding.get_abstract_mesh().manual_axes} & {*self.plan.mesh.axis_names}:
            raise UserError(
                "A gradient takes global arrays and shards them itself; given a call inside a shard_map over "
                f"{', '.join(sorted(manual))}. Call it outside."
            )
        for number, leaves in enumerate(map(jax.tree.leaves, state.params)):
            if leaves and not any(isinstance(leaf, Tracer) for leaf in leaves):
                takes = "differentiates" if number in self._numbers else "reads"
                notice(
                    f"a gradient inside a jitted function {takes} a model that this function closes over: the weights "
                    "are constants of the compiled program, and updates do not reach it. Pass the model as an argument"
                )


def _models_placements(plan: Plan, state: AnyState) -> PyTree:
    """Return a tree like the joined parameters, of `Placement`: the plan places each model by itself."""
    models, adapter = len(state.params), state.static.adapter
    placed = tuple(map(plan.tree_placements, state.params, adapter.specs))
    plan.check_rules([placement.path for placement in jax.tree.leaves(placed)])
    leaves, treedef = jax.tree.flatten(placed)
    trained = state.static.trained or (True,) * len(leaves)
    owners = [number for number, tree in enumerate(placed) for _ in jax.tree.leaves(tree)]
    paths = [path_in_model(owner, models, leaf.path) for owner, leaf in zip(owners, leaves, strict=True)]
    marked = [replace(leaf, path=p, trained=t) for leaf, p, t in zip(leaves, paths, trained, strict=True)]
    # `jdp.init` and `jdp.place` know no `wrt`, and replicate parameters that `wrt` alone selects
    changes = {"rest": PartitionSpec(), "compute": PartitionSpec(), "reason": "replicated: not an nnx.Param"}
    return treedef.unflatten([replace(leaf, **changes) if leaf.path in adapter.named else leaf for leaf in marked])
