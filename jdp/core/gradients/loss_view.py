"""How a loss is called: in which view, on which rows, with which key; and why.

The result of the loss decides (`chosen_view`). If it is called on parts of the batch, its declaration is tried
(`loss_check`), and its draws (`row_keys`) and the rows of its aux are read. A loss that cannot be called on parts gets
`auto` with one microbatch, which is reported, or an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import jax
from jax.core import eval_context
from jax.extend.core import Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import NamedSharding

from jdp.base.errors import UserError
from jdp.base.formatting import format_bytes
from jdp.base.notices import notice
from jdp.base.words import Partitioning
from jdp.core.batch import batch_rows
from jdp.core.gradients.collectives import GradientSpec
from jdp.core.gradients.loss_call import (
    LossForm,
    LossWithAux,
    names_of,
    shape_of,
    trace_loss,
    traced_dtype,
    with_outputs,
)
from jdp.core.gradients.loss_check import UNDECIDED, Trial, UntriedError, drawn_like
from jdp.core.gradients.row_keys import RowDraws, draws_anything, is_of_row_key, read_draws, row_key_shape
from jdp.core.gradients.views import chosen_view, on_every_device
from jdp.core.plan import Plan
from jdp.core.reading import every_eqn, user_line
from jdp.core.sharding.host_memory import is_described
from jdp.core.sharding.placement import axes_of
from jdp.core.state import AnyState
from jdp.core.types import Batch, LossFn, PartsError

Values = Literal["real", "abstract", "drawn"]
"""The values on which a loss is tried. "real": those of the first call. "abstract": none, so it is believed. "drawn":
values that are drawn while a user's function is traced."""


@dataclass(frozen=True)
class View:
    """How a loss is called for a batch of certain shapes."""

    partitioning: Partitioning
    why: str
    loss_fn: LossFn  # with its aux marked as rows or not
    draws: RowDraws | None  # which draws count rows, if the loss is called on parts of the batch
    is_random: bool  # it draws random numbers
    operations: frozenset[str]  # names of JAX's primitives in its forward pass


Trials = dict[Hashable, str | None]
"""The results of a loss' trials: `form_of` a model and its batch, whatever the number of rows -> the finding."""
MOST_DRAWN = 2**30
"""Bytes of weights and rows that are drawn for a trial inside of `jit`."""
IN_TRAINING_ALONE = "rows change each other in training alone, as in a batch norm"


def form_of(state: AnyState, batch: Batch, size: Literal["ndim", "shape"]) -> Hashable:
    """Return the module (its mode decides whether it draws), and the `size` and dtype of each parameter and array."""
    leaves, structure = jax.tree.flatten((state.params, batch))
    return state.static.adapter, structure, tuple([(getattr(x, size), traced_dtype(x)) for x in leaves])


def try_once(trials: Trials, values: Values, trial: Trial, rows: int) -> str | None:
    """Return why the loss cannot be called on parts of the batch, or None if it can; try it once for each form."""
    form = form_of(trial.state, trial.batch, "ndim")
    if form not in trials:
        if values == "abstract" or (values == "drawn" and not _is_drawable(trial)):
            return None
        trials[form] = _finding(trial, rows) if values == "real" else _finding_on_drawn_values(trial, rows)
    return trials[form]


def _finding(trial: Trial, rows: int) -> str | None:
    adapter = trial.state.static.adapter
    try:
        finding = trial.finding(rows)
    except UntriedError as error:
        return f"whether it is a sum over rows is not known: {error}"
    trains = trial.spec.settings.train and adapter is not None and adapter.has_statistics
    if finding is None or trial.statistics or not trains:
        return finding
    with suppress(UntriedError):
        return finding if replace(trial, evaluates=True).finding(rows) else IN_TRAINING_ALONE
    return finding


def _finding_on_drawn_values(trial: Trial, rows: int) -> str | None:
    """Return the finding on drawn weights and rows, with larger integers if nothing was decided."""
    plan, state, finding = trial.spec.plan, trial.state, None
    rest = jax.tree.map(lambda placement: NamedSharding(plan.mesh, placement.rest), trial.spec.placements)
    replicated = jax.tree.map(lambda _: plan.replicated, state.model_state)
    shardings = jax.tree.map(lambda _: plan.batch_sharding, trial.batch)
    with eval_context():  # `jax.ensure_compile_time_eval` would compile each constant of the loss by itself
        params, variables = drawn_like(state.params, rest), drawn_like(state.model_state, replicated, positive=True)
        drawn = replace(trial, state=replace(state, params=params, model_state=variables))
        for integers in (1, 9, 99):
            batch = drawn_like(trial.batch, shardings, integers=integers, positive=integers > 1)
            finding = _finding(replace(drawn, batch=batch), rows)
            if finding is None or not finding.endswith(UNDECIDED):
                break
    return finding and f"{finding} (tried on drawn values; `check`, outside jit, tries real values)"


def _is_drawable(trial: Trial) -> bool:
    """Return False for described devices, and for weights that are too large to make twice, which is reported."""
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((trial.state.params, trial.batch)))
    is_real = not is_described(trial.spec.plan.mesh)
    if is_real and size > MOST_DRAWN:
        notice(
            f"the loss was not tried inside jit, because its weights and rows take {format_bytes(size)}: jdp believes "
            "that it is a sum over rows. Call gradient.check(model, batch, rng) once, outside jit"
        )
    return is_real and size <= MOST_DRAWN


def settle_view(spec: GradientSpec, state: AnyState, batch: Batch, trial: Callable[[Trial, int], str | None]) -> View:
    """Return the view of a step for these shapes. Raises ValueError if the loss cannot be called as requested."""
    settings = spec.settings
    read = partial(_read, spec, state, batch)
    reading = first_reading = read(settings.requested or "auto")
    name, why = chosen_view(settings.requested, first_reading.form, spec.plan.batch_shards, settings.train)
    if settings.accumulate > 1:
        _check_microbatches(first_reading.form, settings.accumulate)
    reason = None
    if name != first_reading.partitioning:
        try:
            reading = read(name)
        except Exception as error:  # raised by the user's own code, which may need global arrays
            first = str(error).partition("\n")[0]
            reason = f"it cannot be called on one device's rows ({type(error).__name__}: {first})"
    reason = reason or reading.obstacle(trial)
    if reason is not None and name != first_reading.partitioning:
        why = f"the loss returns jdp.Loss, but {reason}, so a call sees the rows of all devices"
        reading, reason = first_reading, first_reading.obstacle(trial)
    if reason is not None and not (reason == IN_TRAINING_ALONE and reading.partitioning == "auto"):
        raise UserError(_refusal(spec, name, reason))
    reading.check_metrics()
    # every module's keys are folded from the step's, also where dropout in evaluation mode does not use them
    live, _ = dce_jaxpr(reading.jaxpr, [True] * len(reading.jaxpr.outvars))
    is_random = draws_anything(live)
    operations = frozenset(eqn.primitive.name for eqn in every_eqn(reading.jaxpr))
    return View(reading.partitioning, why + reading.remarks, reading.loss_fn, reading.draws, is_random, operations)


def _check_microbatches(form: LossForm, count: int) -> None:
    """Check that a loss can be called on several microbatches. Raises ValueError."""
    rule = f"accumulate={count} calls the loss on {count} microbatches, one after another"
    if form.is_scalar:
        raise UserError(
            f"{rule}, and the mean of their means is not the batch's; given a loss that returns a scalar. Return the "
            "sum over rows and its divisor: `return jdp.Loss(total, weight)`, such as jdp.Loss(nll.sum(), nll.size)."
        )
    if form.gathers_rows:
        raise UserError(
            f"{rule}, which would each compare other rows; given a loss that calls jdp.gather_rows. Take accumulate=1."
        )


def _refusal(spec: GradientSpec, name: Partitioning, reason: str) -> str:
    plan, accumulate, adapter, fix = spec.plan, spec.settings.accumulate, spec.adapter, ""
    if "change the part of rows" in reason or "statistics in the model" in reason:  # a batch norm, perhaps
        if None in getattr(adapter, "adapters", (adapter,)):  # a model that is a plain pytree
            fix = " If a batch norm of linen is the cause, wrap the model in nnx.bridge.ToNNX."
        elif adapter.has_statistics:
            fix = " If a batch norm is the cause, give it train=rng is not None."
    parts = [f"{axis}={plan.mesh.shape[axis]}" for axis in plan.batch_axes if name == "manual"]
    parts += [f"accumulate={accumulate}"] if accumulate > 1 else []
    return (
        f"A loss that is called on parts of the batch ({' × '.join(parts)}) must be a sum over rows, and draw by row; "
        f"{reason}. {'Take accumulate=1 and leave' if accumulate > 1 else 'Leave'} partitioning to jdp: it then sees "
        f"all rows.{fix} check_loss=False turns the trial off."
    )


def _read(spec: GradientSpec, state: AnyState, batch: Batch, partitioning: Partitioning) -> _Reading:
    """Trace the loss on the rows of one call of a view."""
    plan, size = spec.plan, batch_rows(batch)
    calls = spec.settings.accumulate * (plan.batch_shards if partitioning == "manual" else 1)
    rows = size // calls
    within = partial(on_every_device, plan=plan) if partitioning == "manual" else lambda call: call
    key = None
    if spec.settings.train:
        key = shape_of(state.rng) if calls == 1 else row_key_shape(rows)
    trace = partial(trace_loss, spec.loss_fn, spec.settings.precision, state, batch, key=key, within=within)
    try:
        jaxpr, form = trace(rows)
    except NameError as error:
        raise _of_unbound_axis(error, plan, partitioning) from error
    except NotImplementedError as error:
        if not is_of_row_key(error):
            raise
        refusal = f"{str(error).partition(',')[0]}, which a part of the batch does not have; use another draw"
        raise UserError(_refusal(spec, partitioning, refusal)) from error
    except Exception as error:
        if key is None and "NoneType" in str(error):
            error.add_note("jdp calls the loss with rng=None in an evaluation: draw random numbers only in training")
        if calls > 1:
            first, accepts_all = str(error).partition("\n")[0], False
            with suppress(Exception):  # raised by the user's own code, on all rows too
                accepts_all = bool(trace(size))
            for name, leaf in zip(names_of(state.model_state), jax.tree.leaves(state.model_state), strict=True):
                if accepts_all and leaf.shape[:1] == (size,):
                    raise UserError(
                        f"Model state is the same for every part of a batch; given {name}, {list(leaf.shape)}, with a "
                        f"batch of {size} rows, and the loss fails on {rows} of them ({first}). Keep values of rows in "
                        "the batch, or take accumulate=1 and leave partitioning to jdp."
                    ) from error
            error.add_note(f"jdp called the loss on {rows} rows, one of {calls} parts of the batch")
        raise
    return _Reading(spec, state, batch, partitioning, calls, rows, trace, jaxpr, form)


@dataclass(frozen=True)
class _Reading:
    """A loss, traced on shapes as a view calls it; `jaxpr` and `form` are those of one call."""

    spec: GradientSpec
    state: AnyState
    batch: Batch
    partitioning: Partitioning
    calls: int  # parts of a batch on which the loss is called
    rows: int  # of one call
    trace: Callable[[int], tuple[Jaxpr, LossForm]]  # for another number of rows
    jaxpr: Jaxpr
    form: LossForm

    @cached_property
    def twice(self) -> tuple[Jaxpr, LossForm]:
        """The trace for twice the rows of one call. Raises PartsError."""
        try:
            return self.trace(2 * self.rows)
        except Exception as error:  # raised by the user's own code, perhaps at this size only
            given = f"{self.rows} rows and not {2 * self.rows} ({type(error).__name__}: {str(error)[:200]})"
            raise PartsError(f"it accepts {given}; write it for any number of rows") from error

    @cached_property
    def draws(self) -> RowDraws | None:
        """Which draws count rows, if the loss is called on parts of the batch. Raises PartsError."""
        if self.calls == 1 or not draws_anything(self.jaxpr):
            return None
        return read_draws(self.jaxpr, self.twice[0], self.rows, self.state.rng)

    @cached_property
    def loss_fn(self) -> LossFn:
        """The loss, with its aux marked as rows or not. Raises PartsError."""
        loss = self.spec.loss_fn
        if not isinstance(loss, LossWithAux):
            return loss
        return with_outputs(loss, self.form, self.twice[1] if self.calls > 1 else None, self.rows)

    def obstacle(self, trial: Callable[[Trial, int], str | None]) -> str | None:
        """Return why the loss cannot be called as this view requires; None if it can."""
        if self.calls == 1:
            return None
        try:
            _, loss_fn = self.draws, self.loss_fn
        except PartsError as error:
            return str(error)
        if self.partitioning == "manual" and (line := _global_line(self.jaxpr, self.spec.plan)):
            return f"it shards over the axes of the batch at {line}, which one device's rows do not have"
        if self.form.gathers_rows or not self.spec.settings.check_loss:
            return None
        if (weight := self.form.weight) is not None:
            with suppress(Exception):  # raised by the user's own code: it may take the rows of one call alone
                whole = self.trace(size := batch_rows(self.batch))[1].weight
                if whole is not None and abs(whole - weight * self.calls) > 1e-5 * abs(whole):
                    return f"Loss.weight is {weight:.6g} of {self.rows} rows and {whole:.6g} of {size}"
        spec, averaged = replace(self.spec, loss_fn=loss_fn), self.form.statistics * (self.partitioning == "manual")
        return trial(Trial(spec, self.state, self.batch, draws_anything(self.jaxpr), statistics=averaged), self.rows)

    @property
    def remarks(self) -> str:
        """Consequences of the view that a user may not expect, as the end of a sentence."""
        precision = self.spec.settings.precision
        if not self.spec.settings.train:
            return ""
        if self.partitioning == "auto" and self.spec.plan.batch_shards > 1 and precision.reduce != precision.compute:
            return f"; XLA then reduces gradients in {precision.compute}"
        if self.partitioning == "manual" and self.form.is_averaged:
            return f"; each device computes {self.form.statistics[0]} over its own rows, and the values are averaged"
        return ""

    def check_metrics(self) -> None:
        """Check that the shapes of metrics do not depend on the number of rows."""
        for name, shape in self.form.metrics.items():
            if shape and (twice := self.twice[1].metrics[name]) != shape:
                raise UserError(
                    f"A metric is summed over rows, so its shape does not depend on their number; metric {name!r} has "
                    f"shape {shape} for {self.rows} rows and {twice} for twice as many. Sum it over the batch, or "
                    "return values of single rows as aux (has_aux)."
                )


def _global_line(jaxpr: Jaxpr, plan: Plan) -> str | None:
    """Return the source line of the first sharding constraint over axes of the batch; None if there is none."""
    for eqn in every_eqn(jaxpr):
        spec = getattr(eqn.params["sharding"], "spec", ()) if eqn.primitive.name == "sharding_constraint" else ()
        if any(axis in plan.batch_axes for entry in spec for axis in axes_of(entry)):
            return user_line(eqn)
    return None


def _of_unbound_axis(error: NameError, plan: Plan, partitioning: Partitioning) -> Exception:
    """Return the error for a loss that names a mesh axis that its view does not bind."""
    match = re.search(r"unbound axis name:? (\w+)", str(error))
    if match is None:
        return error
    return UserError(
        f"A loss may name only the batch's mesh axes, {' and '.join(plan.batch_axes)}, and only under partitioning="
        f"'manual'; given {match[1]!r} under {partitioning!r}. Leave it out: jdp sums the results of a loss over "
        "devices, and under 'auto' a BatchNorm of linen without axis_name sees all rows."
    )
