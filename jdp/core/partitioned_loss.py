"""A loss on a plan: what `make_train_step` and `value_and_grad` have in common.

It settles the partitioning once for each shape of the batch, tries the loss on a few rows, and sums its gradients over
devices and microbatches (`jdp.core.gradients`). What becomes of the gradients is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jdp.base.words import Partitioning
from jdp.core.batch import agree_on_inputs, agree_on_program, batch_rows, check_global
from jdp.core.cluster.agreement import processes_of
from jdp.core.compiling.options import CompilerValue
from jdp.core.gradients import auto, manual
from jdp.core.gradients.accumulate import GradientSpec
from jdp.core.gradients.loss_call import Sums
from jdp.core.gradients.loss_program import Programs
from jdp.core.gradients.partitioning import REQUESTED, Choice, PartitioningRequest
from jdp.core.gradients.remade import report_remade
from jdp.core.gradients.row_proof.quotients import Reading
from jdp.core.plan import Plan
from jdp.core.sharding.axes import BatchUnit, batch_unit
from jdp.core.sharding.host_memory import on_device
from jdp.core.sharding.mesh import tracing_on
from jdp.core.state import AnyState
from jdp.core.step_settings import StepSettings
from jdp.core.types import Batch, LossFn, PyTree

VIEWS = {"auto": auto, "manual": manual}


class Settled:
    """What a step or gradient found out: the part of it that changes.

    Attributes:
        choices: by shapes of parameters and batch, the partitioning and the reason.
        programs: by shapes, the programs of the loss that a choice was made by, for the next trace of the step.
        placements: by parameters, their placements.
        corrected: choices that the loss's values changed, for batches of any shape.
        is_checked: True once a first call had values.
        agreed: the shapes that all processes agree on.
        compiled: jitted functions, by name; they are made anew when a choice is corrected.
    """

    def __init__(self, before: Settled | None = None) -> None:
        self.choices: dict[Any, Choice] = {}
        self.programs: dict[Any, Programs] = {}
        self.placements: dict[Any, PyTree] = {}
        self.corrected: list[Choice] = [] if before is None else list(before.corrected)
        self.is_checked = before is not None and before.is_checked
        self.agreed: set[Any] = set()
        self.compiled: dict[str, Any] = {}


@dataclass(frozen=True)
class PartitionedLoss(StepSettings):
    """A loss, the devices that compute it, and the settings that a training step shares with other gradients.

    Attributes:
        loss_fn: the loss function.
        plan: the mesh and the strategy.
    """

    loss_fn: LossFn
    plan: Plan
    _settled: Settled = field(init=False, default_factory=Settled, repr=False, compare=False)

    @property
    def partitioning(self) -> Partitioning | None:
        """ "auto" or "manual"; None if jdp is to choose and has not traced the loss yet."""
        return self._last.partitioning if self._last else self.requested

    @property
    def why(self) -> str:
        """The reason for `partitioning`."""
        if self._last:
            return self._last.why
        return REQUESTED if self.requested else "settled when the step is first traced"

    @property
    def _last(self) -> Choice | None:
        return next(reversed(self._settled.choices.values()), None)

    @property
    def noun(self) -> str:
        """What this is, in reports."""
        return "train step" if self.train else "eval step"

    @property
    def microbatches(self) -> int:
        """Number of parts of a device's rows that are computed one after another, in all steps of a call."""
        return self.accumulate * (self.local_steps.steps if self.local_steps else 1)

    @property
    def batch_unit(self) -> BatchUnit:
        """What a global batch's rows must divide by."""
        steps = self.local_steps.steps if self.local_steps else 1
        return batch_unit(self.plan.mesh.shape, self.accumulate, self.group, steps, named=self.plan.called)

    def choose_partitioning(self, state: AnyState, batch: Batch) -> str:
        """Return "auto" or "manual", as `choose` does."""
        return self.choose(state, batch).partitioning

    def choose(self, state: AnyState, batch: Batch, *, values: bool = False, assume: bool = False) -> Choice:
        """Check the batch, choose the partitioning for these shapes, and report it once."""
        self.batch_unit.check(batch_rows(batch))
        placed = zip(jax.tree.leaves(self.param_placements(state)), jax.tree.leaves(state.params), strict=True)
        self.precision.check_params({placement.path: leaf for placement, leaf in placed if placement.trained})
        shapes = _shapes(state, batch)
        if shapes not in self._settled.choices or values:
            state, batch = self.plan.entered((on_device(state), batch))
            request = self._request(state)
            known = self._settled.choices.pop(shapes, None)
            if known is None:
                known, self._settled.programs[shapes] = request.choose(state, batch), request.spec.programs
            for found in self._settled.corrected:  # what the check found holds for batches of other shapes too
                known = replace(known, partitioning=found.partitioning, why=found.why, proven=True)
            chosen = request.check(known, state, batch) if values and self.check_loss else known
            if not (chosen.proven or values or self._settled.is_checked):
                chosen = request.assumed(chosen) if assume else request.without_values(chosen)
            if values and chosen.partitioning != known.partitioning:
                self._settled.corrected.append(chosen)
                self._settled.compiled.clear()  # it may have been lowered for the choice before
            self._settled.choices[shapes] = chosen
            request.announce(chosen, state, self.noun)
        return self._settled.choices[shapes]

    def check_first(self, state: AnyState, batch: Batch) -> None:
        """Choose the partitioning before the first trace, which tries the loss once where there are values.

        Abstract values are taken to be of a program that is only looked at. While a user's function is traced, the
        trace chooses.
        """
        batch_rows(batch)
        leaves = jax.tree.leaves((state, batch))
        if self._settled.is_checked or any(issubclass(kind, Tracer) for kind in set(map(type, leaves))):
            return
        values = not [leaf for leaf in leaves if not isinstance(leaf, jax.Array | np.ndarray)]
        with tracing_on(self.plan.mesh):
            self.choose(state, batch, values=values, assume=not values)
        if values:
            self._settled.is_checked = True
            report_remade(self, (state, batch))

    def under(self, plan: Plan, **changes: Any) -> Self:
        """Return the same for another plan, with what was found when the loss was tried."""
        other = replace(self, plan=plan, **changes)
        object.__setattr__(other, "_settled", Settled(self._settled))
        return other

    @cached_property
    def is_of_several(self) -> bool:
        """Whether the mesh has devices of several processes."""
        return len(processes_of(self.plan.mesh)) > 1

    def agree(
        self,
        caller: str,
        shapes: Any,
        state: AnyState,
        batch: Batch,
        lower: Callable[[], jax.stages.Lowered],
        compiler_options: Mapping[str, CompilerValue] | None = None,
    ) -> None:
        """Check once for these shapes that all processes agree, before they compute together."""
        if shapes is None or shapes in self._settled.agreed:
            return
        check_global(batch)
        agree_on_inputs(caller, state, batch, self.plan)
        if not self._settled.is_checked:
            self.check_first(state, batch)
        agree_on_program(caller, lower(), self.plan, compiler_options or {})
        self._settled.agreed.add(shapes)

    def param_placements(self, state: AnyState) -> PyTree:
        """Return a tree like the parameters, of `Placement`."""
        leaves, structure = jax.tree.flatten(state.params)
        static, shapes = state.static, tuple([(leaf.shape, leaf.dtype) for leaf in leaves])
        key = structure, shapes, static.specs, static.trained, static.flat
        if key not in self._settled.placements:
            self._settled.placements[key] = self.plan.param_placements(state.params, state.static)
        return self._settled.placements[key]

    def gradient_spec(self, state: AnyState, reading: Reading | None = None) -> GradientSpec:
        """Return what the gradient code needs: the loss, the placements and the settings."""
        overlap = self.plan.mesh.devices.flat[0].platform != "cpu" if self.overlap is None else self.overlap
        return GradientSpec(
            self.loss_fn,
            state.static.adapter,
            self.param_placements(state),
            self.plan.row,
            self.settings(accumulate=self.microbatches, overlap=overlap),
            state.static.trained,
            reading=reading,
        )

    def gradients(
        self,
        state: AnyState,
        batch: Batch,
        key: jax.Array,
        kept: dict[str, PyTree],
        spec: GradientSpec | None = None,
    ) -> tuple[PyTree, Sums, PyTree, dict[str, PyTree]]:
        """Return the gradient of Σtotal / Σweight, float32 at rest specs, while a step is traced."""
        choice = self.choose(state, batch)
        spec = replace(spec or self.gradient_spec(state), reading=choice.reading)
        with self._handed_on(spec, state, batch) as spec:
            run = VIEWS[choice.partitioning].gradients(spec, self.plan)
            grads, sums, model_state, kept = run(self._computed_with(state), state.model_state, batch, key, kept)
        self._request(state).check_metrics(sums, state, batch)
        return jax.tree.map(lambda g: g.astype(jnp.float32) / sums.weight, grads), sums, model_state, kept

    def evaluate(self, state: AnyState, batch: Batch) -> Sums:
        """Return the sums over the whole batch, forward only, while a step is traced."""
        choice = self.choose(state, batch)
        with self._handed_on(self.gradient_spec(state, choice.reading), state, batch) as spec:
            evaluate = VIEWS[choice.partitioning].evaluation(spec, self.plan)
            sums = evaluate(state.params, state.model_state, batch)
        self._request(state).check_metrics(sums, state, batch)
        return sums

    @contextmanager
    def _handed_on(self, spec: GradientSpec, state: AnyState, batch: Batch) -> Generator[GradientSpec]:
        """Have the step use the programs that the choice was made by, once: their constants may be of this trace."""
        programs = self._settled.programs.pop(_shapes(state, batch), None) or spec.programs
        try:
            yield replace(spec, programs=programs)
        finally:
            programs.clear()

    def _computed_with(self, state: AnyState) -> PyTree:
        """Return the parameters; of what rests on the host and is trained the device holds the compute dtype alone."""
        if self.plan.offload is None:
            return state.params
        dtype = self.precision.compute_dtype
        return jax.tree.map(
            lambda x, placement: x.astype(dtype) if placement.on_host and placement.trained else x,
            state.params,
            self.param_placements(state),
        )

    def _request(self, state: AnyState) -> PartitioningRequest:
        return PartitioningRequest(self.gradient_spec(state), self.plan)


def _shapes(state: AnyState, batch: Batch) -> Hashable:
    """Return what choices are kept by."""
    return tuple([(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves((state.params, batch))])


def means(sums: Sums) -> dict[str, jax.Array]:
    """Return the metrics of sums over the whole batch: the loss, the weight and the loss function's own."""
    own = {name: total / weight for name, (total, weight) in sums.metrics.items()}
    return {**own, "loss": sums.total / sums.weight, "weight": sums.weight}
