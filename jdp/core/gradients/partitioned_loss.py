"""A loss on a plan, for a step or a gradient.

It decides once for each shape of the batch how the loss is called (`loss_view`), and sums its gradients over devices
and microbatches. The step or the gradient decides how to use them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jdp.base.notices import notice
from jdp.base.words import Partitioning
from jdp.core.batch import agree_on_inputs, agree_on_program, batch_rows, check_global, local_numbers
from jdp.core.cluster.agreement import passed, processes_of
from jdp.core.compiling.options import CompilerValue
from jdp.core.gradients.collectives import GradientSpec
from jdp.core.gradients.loss_call import Sums
from jdp.core.gradients.loss_view import Trials, Values, View, form_of, settle_view, try_once
from jdp.core.gradients.views import REQUESTED, evaluated, view_gradients
from jdp.core.plan import Plan
from jdp.core.sharding.axes import BatchUnit, batch_unit
from jdp.core.sharding.mesh import tracing_on
from jdp.core.state import AnyState
from jdp.core.step_settings import StepSettings
from jdp.core.types import Batch, LossFn, PyTree


def read_only(path: str) -> Any:
    """Return a property that reads an attribute of an attribute, such as "loss.plan"."""
    return property(attrgetter(path))


class PartitionedLoss:
    """A loss on a plan: decides how the loss is called, and computes its gradient."""

    def __init__(
        self,
        loss_fn: LossFn,
        plan: Plan,
        settings: StepSettings,
        noun: str,
        place: Callable[[Plan, AnyState], PyTree] | None = None,
    ) -> None:
        self.loss_fn, self.plan, self.settings = loss_fn, plan, settings
        self.noun = noun  # in reports, such as "train step"
        self.is_checked = False  # True after the first call with values
        self.compiled: dict[str, Any] = {}  # jitted functions by name; cleared if the view of the loss changes
        self._place = place  # the parameters' placements, if they differ from a train state's
        self._views: dict[Hashable, View] = {}
        self._trials: Trials = {}
        self._agreed: set[Hashable] = set()  # shapes that all processes agree on
        self._last_agreed: Hashable = None
        self._dispatched: jax.Array | None = None  # the loss of the last call

    @property
    def latest_view(self) -> View | None:
        """The view of the latest trace; None before the first one."""
        return next(reversed(self._views.values()), None)

    @property
    def is_random(self) -> bool:
        """Whether the loss draws random numbers in every view: a module in evaluation mode may draw none."""
        return bool(self._views) and all(view.is_random for view in self._views.values())

    @property
    def partitioning(self) -> Partitioning | None:
        """ "auto" or "manual"; None if the loss decides and was not yet traced."""
        return self.latest_view.partitioning if self.latest_view else self.settings.requested

    @property
    def why(self) -> str:
        if self.latest_view:
            return self.latest_view.why
        return REQUESTED if self.settings.requested else "settled when the step is first traced"

    @property
    def batch_unit(self) -> BatchUnit:
        """The factors that must divide the rows of a global batch."""
        return batch_unit(self.plan.mesh.shape, self.settings.accumulate)

    def view(self, state: AnyState, batch: Batch, values: Values = "drawn") -> View:
        """Check the batch, decide how the loss is called for these shapes, and report it once."""
        self.batch_unit.check(batch_rows(batch))
        placed = zip(jax.tree.leaves(self.param_placements(state)), jax.tree.leaves(state.params), strict=True)
        self.settings.precision.check_params({placement.path: leaf for placement, leaf in placed if placement.trained})
        shapes = form_of(state, batch, "shape")
        if shapes in self._views and (values != "real" or form_of(state, batch, "ndim") in self._trials):
            return self._views[shapes]
        before = self._views.pop(shapes, None)
        settled = settle_view(self.gradient_spec(state), state, batch, partial(try_once, self._trials, values))
        if before is not None and (before.partitioning, before.draws) != (settled.partitioning, settled.draws):
            self.compiled.clear()  # they may have been lowered for the previous view
        self._views[shapes] = settled
        if self.settings.train and self.plan.batch_shards > 1 and settled.why != REQUESTED:
            notice(f"{self.noun} under {self.plan.strategy}: partitioning={settled.partitioning!r}: {settled.why}")
        return settled

    def check_first(self, state: AnyState, batch: Batch) -> None:
        """Decide how the loss is called before the first trace, and try it on real values; not in a traced function."""
        batch_rows(batch)
        leaves = jax.tree.leaves((state, batch))
        if self.is_checked or any(issubclass(kind, Tracer) for kind in set(map(type, leaves))):
            return
        is_real = all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)
        with tracing_on(self.plan.mesh):
            self.view(state, batch, "real" if is_real else "abstract")
        self.is_checked = self.is_checked or is_real

    def under(self, plan: Plan) -> PartitionedLoss:
        """Return this loss for another plan, with the findings of its trial."""
        other = PartitionedLoss(self.loss_fn, plan, self.settings, self.noun, self._place)
        other.is_checked, other._trials = self.is_checked, self._trials
        return other

    @cached_property
    def is_of_several(self) -> bool:
        """Whether the mesh has devices of several processes."""
        return len(processes_of(self.plan.mesh)) > 1

    @cached_property
    def _shares_threads(self) -> bool:
        """Whether this process has several CPU devices, whose programs share a pool of threads."""
        local = self.plan.mesh.local_devices
        return len(local) > 1 and local[0].platform == "cpu"

    def limit_run_ahead(self, metrics: Mapping[str, jax.Array]) -> None:
        """On several CPU devices, wait for the call before the one that computes these metrics.

        Otherwise many calls could take all threads, and a collective of the first would wait for a thread until XLA
        aborts (`base.machine.provide_threads`).
        """
        if self._shares_threads and not isinstance(metrics["loss"], Tracer):
            before, self._dispatched = self._dispatched, metrics["loss"]
            if before is not None and not before.is_deleted():
                before.block_until_ready()

    def agree(
        self,
        shapes: Any,
        state: AnyState,
        batch: Batch,
        lower: Callable[[], jax.stages.Lowered],
        *,
        compiler_options: Mapping[str, CompilerValue] | None = None,
    ) -> None:
        """Check that all processes agree before they compute together, unless nothing changed since the last call.

        Shapes and the numbers set in the state are compared after each change; the program once for its shapes.
        """
        if shapes is None:
            return
        numbers = local_numbers(state)
        if (shapes, numbers) != self._last_agreed:
            program = shapes, tuple(number[:2] for number in numbers)  # paths and dtypes
            check_global(batch)
            agree_on_inputs(f"the {self.noun}", state, batch, self.plan, again=program in self._agreed)
            if program not in self._agreed:
                if not self.is_checked:
                    self.check_first(state, batch)
                agree_on_program(f"the {self.noun}", lower(), self.plan, compiler_options or {})
            self._agreed.add(program)
            self._last_agreed = shapes, numbers
        passed(self.plan.mesh)

    def param_placements(self, state: AnyState) -> PyTree:
        if self._place is not None:
            return self._place(self.plan, state)
        return self.plan.param_placements(state.params, state.static)

    def gradient_spec(self, state: AnyState, view: View | None = None) -> GradientSpec:
        """Return the loss, the placements and the settings, for the code of the gradient."""
        return GradientSpec(
            self.loss_fn if view is None else view.loss_fn,
            state.static.adapter,
            self.param_placements(state),
            self.plan,
            self.settings,
            state.static.trained,
            draws=None if view is None else view.draws,
            operations=frozenset() if view is None else view.operations,
        )

    def gradients(self, state: AnyState, batch: Batch, key: jax.Array) -> tuple[PyTree, Sums, PyTree]:
        """Return the gradient of Σtotal / Σweight, in float32 and sharded as at rest, while a step is traced."""
        view = self.view(state, batch)
        spec = self.gradient_spec(state, view)
        grads, sums, model_state = view_gradients(view.partitioning, spec, state.params, state.model_state, batch, key)
        return jax.tree.map(lambda g: g.astype(jnp.float32) / sums.weight, grads), sums, model_state

    def evaluate(self, state: AnyState, batch: Batch) -> Sums:
        """Return the sums over the whole batch, forward only, while a step is traced."""
        view = self.view(state, batch)
        spec = self.gradient_spec(state, view)
        return evaluated(view.partitioning, spec, state.params, state.model_state, batch)


def means(sums: Sums) -> dict[str, jax.Array]:
    """Return the loss, the weight and the loss' metrics over the whole batch; NAME_weight is a metric's own."""
    metrics = {name: total / (*own, sums.weight)[0] for name, (total, *own) in sums.metrics.items()}
    weights = {f"{name}_weight": own for name, (_, *rest) in sums.metrics.items() for own in rest}
    return {**metrics, **weights, "loss": sums.total / sums.weight, "weight": sums.weight}
