"""Which partitioning a step gets, and why; and whether its loss may be called on parts of a batch.

Auto, unless auto cannot keep the communication contract: then manual, for a loss that is a sum over examples. That is
proven from the loss' program (`row_proof`), or tried on values before the first step (`loss_check`). A loss that mixes
examples, or of which neither is known, gets auto with one microbatch, or an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from jdp.base.notices import notice
from jdp.base.words import Partitioning
from jdp.core.batch import batch_rows
from jdp.core.gradients import auto, manual
from jdp.core.gradients.auto_contract import auto_breach, dtype_breach, leaf_breach
from jdp.core.gradients.global_trace import global_trace, names_axes, two_traces
from jdp.core.gradients.loss_call import Sums
from jdp.core.gradients.loss_check import constant_term, mixing
from jdp.core.gradients.loss_trace import LossTrace, trace_loss
from jdp.core.gradients.microbatch import first_call
from jdp.core.gradients.row_proof.proof import ends_in_quotient, prove
from jdp.core.gradients.row_proof.quotients import Reading
from jdp.core.gradients.row_proof.rules import STATISTICS
from jdp.core.gradients.spec import Collectives, GradientSpec
from jdp.core.plan import Plan
from jdp.core.sharding.traced_mesh import sized_for
from jdp.core.state import AnyState
from jdp.core.step_settings import StepSettings
from jdp.core.tracing.axis_sizes import noting_axis_sizes
from jdp.core.types import Batch

REQUESTED = "asked for"
EVALUATION = "an evaluation step has no gradients to reduce"


@dataclass(frozen=True)
class Choice:
    """A step's partitioning, "auto" or "manual", and the reason for it.

    Attributes:
        gathers_rows: True if the loss calls `jdp.gather_rows`.
        proven: True if the loss may be called as this choice does, as far as is known without values.
        unproven: why its program does not prove that; "" where it does.
        metrics: True if the metrics are proven sums over examples too.
        reading: how a scalar that ends in a quotient of sums is read.
        draws: True if the loss draws random numbers.
    """

    partitioning: Partitioning
    why: str
    gathers_rows: bool = False
    proven: bool = True
    unproven: str = ""
    metrics: bool = True
    reading: Reading | None = None
    draws: bool = False


class _NotAsRunError(Exception):
    """The loss cannot be traced as the step would call it."""


@dataclass(frozen=True)
class PartitioningRequest:
    """What a step's partitioning is chosen for.

    Attributes:
        spec: what the step's gradient is of.
        plan: mesh and strategy.
    """

    spec: GradientSpec
    plan: Plan

    @cached_property
    def settings(self) -> StepSettings:
        """The step's settings."""
        return self.spec.settings

    def choose(self, state: AnyState, batch: Batch) -> Choice:
        """Choose the partitioning from shapes alone.

        The loss is traced as the step will run it, which then need not trace it again. Where that proves nothing, it is
        traced on global arrays: only there a loss may shard over the axes of the batch, and must not name them.
        """
        if (choice := self._choose_as_run(state, batch)) is not None:
            return choice
        self.spec.programs.clear()
        rows = batch_rows(batch) // self.settings.accumulate
        trace = global_trace(self.spec, self.plan, state, batch, rows)
        choice = self._choose(state, trace)
        if trace is None:
            known = self._calls(choice) == 1 or rows == 0 or names_axes(self.spec, self.plan, state, batch)
            return replace(choice, proven=known, metrics=False, unproven=f"it does not take {rows} rows")
        if choice.partitioning == "manual" and (line := trace.global_only(self.plan.batch_axes)):
            choice = self._for_global_loss(line)
        if self._calls(choice) > 1 or ends_in_quotient(trace):
            choice = self._with_proof(choice, trace, state, batch)
        self._report_widened(trace)
        if trace.gathers_rows and self.settings.accumulate > 1:
            raise ValueError(
                "jdp.gather_rows gathers the rows of one microbatch, so each number of microbatches would train "
                f"something else; given accumulate={self.settings.accumulate}. Take accumulate=1."
            )
        return replace(choice, gathers_rows=trace.gathers_rows, draws=trace.program.draws)

    def _choose_as_run(self, state: AnyState, batch: Batch) -> Choice | None:
        """Choose by the program that the step will run; None where that leaves something open."""
        adapter = state.static.adapter
        normed = adapter is not None and bool(adapter.batch_statistics)
        try:
            choice, traces = self._traced_as_run(state, batch)
        except _NotAsRunError:
            return None
        first, *pair = traces
        calls = self._calls(choice)
        if calls > 1 and (normed or first.gathers_rows or not pair or first.names_axes() or constant_term(*pair)):
            return None
        if pair:
            proof = prove(pair[0], pair[1])
            if calls > 1 and proof.verdict != "sum":
                return None
            choice = replace(choice, reading=proof.reading, metrics=proof.of_metrics)
        self._report_widened(first)
        return replace(choice, gathers_rows=first.gathers_rows, draws=first.program.draws)

    def _traced_as_run(self, state: AnyState, batch: Batch) -> tuple[Choice, list[LossTrace]]:
        """Return the choice, the trace of the step's first call of the loss, and the two traces of a proof if any."""
        choice = self._choose(state, None)
        traces = self._first_calls(choice, state, batch)
        if self._asks_for_uses and (again := self._choose(state, traces[0])).partitioning != choice.partitioning:
            return again, self._first_calls(again, state, batch)
        return choice, traces

    def _first_calls(self, choice: Choice, state: AnyState, batch: Batch) -> list[LossTrace]:
        """Trace the first call of the loss in the context of the step, and for a proof two of other numbers of rows."""
        traces, least = list[LossTrace](), 2
        calls, total = self._calls(choice), batch_rows(batch)

        def trace(collectives: Collectives, *given: Any) -> None:
            loss, arguments = first_call(self.spec, collectives, *given)
            rows = batch_rows(arguments[2])

            def on(other: int | None = None) -> LossTrace:
                try:
                    if other is None:
                        return LossTrace(loss.program(arguments), rows)
                    with sized_for(rows, other):
                        return LossTrace(loss.program(arguments, other), other)
                except Exception as error:  # of any kind: it is the user's code, and may need global arrays
                    raise _NotAsRunError from error

            with noting_axis_sizes() as asked:
                traces.append(on())
            if asked and self.settings.requested != "manual":  # then it means something under manual only
                raise _NotAsRunError
            if calls > 1 or ends_in_quotient(traces[0]):
                first = traces[0] if rows >= least else on(max(total, least))
                pair = first, on(total if total > first.rows else 2 * first.rows)
                ends = [ends_in_quotient(each) for each in pair]  # read here, where the axes are bound
                traces.extend(pair if any(ends) == all(ends) else ())

        within = (manual if choice.partitioning == "manual" else auto).within(self.spec, self.plan, trace)
        jax.eval_shape(within, state.params, state.model_state, batch, state.rng if self.settings.train else None)
        return traces

    def _report_widened(self, trace: LossTrace) -> None:
        if self.settings.precision.compute == "bf16" and (wide := trace.widened()):
            notice(
                f"batch[{wide[0]!r}] is float32 and meets bf16 weights at {wide[1]}: that product, and what follows "
                f"from it, is computed in float32; cast it in the loss: batch[{wide[0]!r}].astype(jax.numpy.bfloat16)"
            )

    def _with_proof(self, choice: Choice, trace: LossTrace, state: AnyState, batch: Batch) -> Choice:
        """Return the choice with what the loss' program says of it, or auto where that mixes examples."""
        pair, adapter = two_traces(self.spec, self.plan, trace, state, batch), state.static.adapter
        normed = adapter is not None and bool(adapter.batch_statistics)
        if pair is not None and self._calls(choice) > 1 and (line := constant_term(*pair)):
            choice = self._for_constant_term(choice, line)
        if pair is not None and normed:  # whose statistics are known to be those of all devices
            alike = list[LossTrace | None]()
            for each in pair:
                with sized_for(pair[0].rows, each.rows):
                    alike.append(
                        global_trace(self.spec, self.plan, state, batch, each.rows, optional=True, training=False)
                    )
            pair = None if alike[0] is None or alike[1] is None else (alike[0], alike[1])
        if pair is None:
            only = f"it takes no other number of rows than {trace.rows}"
            return replace(choice, proven=self._calls(choice) == 1, metrics=False, unproven=only)
        first, second = pair
        proof = prove(first, second)
        neighbours = batch_rows(batch) // self.plan.batch_shards  # stay together where each device makes one call
        one_call = choice.partitioning == "manual" and self.settings.accumulate == 1
        divides = one_call and not (first.rows % neighbours or second.rows % neighbours)
        if proof.verdict == "mixes" and divides and prove(first, second, neighbours).verdict == "sum":
            proof = replace(proof, verdict="unknown")
        choice = replace(choice, reading=proof.reading, metrics=proof.of_metrics)
        if self._calls(choice) == 1 or proof.verdict == "sum" or trace.gathers_rows:
            return choice
        lenient = normed and proof.why.startswith(STATISTICS)  # which a call asks for in evaluation mode too
        if proof.verdict == "unknown" or lenient or not self.settings.check_loss:
            return replace(choice, proven=False, unproven=proof.why)
        return self._for_mixing(choice, proof.why)

    def without_values(self, choice: Choice) -> Choice:
        """Return auto for a loss that nothing proves a sum over examples, where it cannot be tried on values."""
        if self._calls(choice) == 1 or not self.settings.check_loss:
            return choice
        return self._for_unknown(choice, f"its program does not tell ({choice.unproven}), and there are no values here")

    def assumed(self, choice: Choice) -> Choice:
        """Return the choice for a program that is only looked at."""
        if self._calls(choice) > 1 and self.settings.check_loss:
            notice(
                "the program is made as if the loss were a sum over examples, which its own program does not tell "
                f"({choice.unproven}); a step tries it on values before it calls it on parts of a batch"
            )
        return replace(choice, proven=True)

    def _for_unknown(self, choice: Choice, reason: str) -> Choice:
        if self.settings.requested is None and self.settings.accumulate == 1:
            why = f"whether the loss is a sum over examples is not known: {reason}; although {choice.why}"
            return replace(choice, partitioning="auto", why=why, proven=True)
        raise ValueError(
            f"A loss must be known to be a sum over examples where it is called on parts of the batch "
            f"({self._calls_as_product(choice)}); {reason}. Try it on values before: gradient.check(model, batch, rng) "
            "outside of jit, or a call of the step itself; or take accumulate=1 and leave partitioning to jdp. "
            "check_loss=False says that you know it is one."
        )

    def _for_mixing(self, choice: Choice, found: str) -> Choice:
        """Return auto for a loss that mixes examples, if auto shows it the whole batch; else raise ValueError."""
        if self.settings.requested is None and self.settings.accumulate == 1:
            why = f"the loss mixes examples ({found}), and only auto sees the whole batch, although {choice.why}"
            return replace(choice, partitioning="auto", why=why, proven=True)
        raise ValueError(
            f"A loss must not mix examples where it is called on parts of the batch "
            f"({self._calls_as_product(choice)}): {found}. Take accumulate=1 and leave partitioning to jdp, which "
            "then shows it the whole batch; if the weight is a constant, count rows instead; if neighbouring rows "
            "belong together, make one row of them, [pairs, 2, ...]. check_loss=False turns this check off."
        )

    def check(self, choice: Choice, state: AnyState, batch: Batch) -> Choice:
        """Compare the loss of a few rows together and apart; return the choice, or auto where only auto is right."""
        calls, adapter = self._calls(choice), state.static.adapter
        if calls == 1 or choice.gathers_rows or (choice.proven and choice.metrics):
            return choice
        try:
            difference = mixing(self.spec, self.plan, state, batch, batch_rows(batch) // calls)
        except Exception as error:  # a faulty loss raises in the step's own trace too, with its own message
            first_line = str(error).partition("\n")[0]
            tried = f"whether the loss mixes examples could not be tried on a few rows: {first_line}"
            tried += "; if neighbouring rows belong together, make one row of them, [pairs, 2, ...]"
            notice(tried)
            return choice if choice.proven else self._for_unknown(choice, tried)
        if difference is None:
            return replace(choice, proven=True)
        if adapter is not None and adapter.batch_statistics:
            notice(f"the loss may mix examples beyond its batch norms: {difference}")
            return replace(choice, proven=True)
        return self._for_mixing(choice, difference)

    def check_metrics(self, sums: Sums, state: AnyState, batch: Batch) -> None:
        """Check that metrics are sums over examples, as far as shapes tell: only arrays can be anything else."""
        arrays = [name for name, (total, _) in sums.metrics.items() if total.ndim]
        if not arrays:
            return
        try:
            few, many = (self._shapes_of_metrics(state, batch, factor * batch_rows(batch)) for factor in (1, 2))
        except Exception as error:  # the user's own code, at a size that it may not expect
            notice(
                f"metric {arrays[0]!r} is an array; whether it is a sum over examples could not be seen from its shape "
                f"for other numbers of rows ({type(error).__name__}: {str(error)[:200]})"
            )
            return
        if wrong := [name for name in arrays if few[name] != many[name]]:
            raise ValueError(
                f"A metric is summed over examples, so its shape does not depend on their number; metric {wrong[0]!r} "
                f"has shape {few[wrong[0]]} for {batch_rows(batch)} rows and {many[wrong[0]]} for twice as many. Sum "
                "it over the batch; what is of single examples, compute beside the loss."
            )

    def _shapes_of_metrics(self, state: AnyState, batch: Batch, rows: int) -> dict[str, tuple[int, ...]]:
        return trace_loss(self.spec.loss_fn, self.settings.precision, state, batch, rows, self.settings.train).metrics

    def announce(self, choice: Choice, state: AnyState, noun: str) -> None:
        """Report the choice for `noun` and its reason, unless the user requested it and it has no drawback."""
        if self.plan.batch_shards == 1 or choice.why == EVALUATION:
            return
        if self.settings.requested is None or choice.why != REQUESTED:
            local = "; the loss is a sum over examples, and sees each device's rows alone"
            notice(
                f"{noun} under {self.plan.strategy}: partitioning={choice.partitioning!r}: {choice.why}"
                f"{local if choice.partitioning == 'manual' else ''}"
            )
        adapter, unsynchronised = state.static.adapter, self.settings.train and not self.settings.sync_batch_norm
        if unsynchronised and choice.partitioning == "auto" and adapter is not None and adapter.has_statistics:
            notice("sync_batch_norm=False changes nothing under partitioning='auto', which sees the whole batch")

    def _choose(self, state: AnyState, trace: LossTrace | None) -> Choice:
        if self.settings.requested is not None:
            drawback = self._drawback(state) if self.settings.train else None
            return Choice(self.settings.requested, f"{REQUESTED}, although {drawback}" if drawback else REQUESTED)
        if self.plan.batch_shards == 1:
            return Choice("auto", "one shard of the batch: nothing to communicate")
        if not self.settings.train:
            return Choice("auto", EVALUATION)
        breach = self._breach(None)
        if breach is None and trace is not None:
            breach = self._breach(trace.reused(self.spec.trained))
        if breach is None:
            return Choice("auto", "XLA keeps the communication contract")
        if names := _unsynchronised(state):
            why = f"{names[0]} may be a statistic of the batch, which only auto sees whole, although {breach}"
            return Choice("auto", why)
        return Choice("manual", breach)

    @property
    def _asks_for_uses(self) -> bool:
        """Whether the choice depends on how often the loss uses a parameter."""
        return (
            self.settings.requested is None
            and self.settings.train
            and self.plan.batch_shards > 1
            and self._breach(None) is None
        )

    def _breach(self, reused: str | None) -> str | None:
        return auto_breach(self.plan, self.settings.accumulate, self.settings.precision, reused, self._leaf_breach)

    @cached_property
    def _leaf_breach(self) -> str | None:
        return leaf_breach(jax.tree.leaves(self.spec.trained_placements))

    def _for_constant_term(self, choice: Choice, line: str) -> Choice:
        """Return auto for a loss with the term at `line`, if auto counts that once; else raise ValueError."""
        if self.settings.requested is None and self.settings.accumulate == 1:
            why = f"the term of Loss.total at {line} does not depend on the batch, and auto alone counts it once"
            return replace(choice, partitioning="auto", why=f"{why}, although {choice.why}")
        raise ValueError(
            f"Loss.total is a sum over examples, but its term at {line} does not depend on the batch: it would be "
            f"counted once for each of {self._calls_as_product(choice)} parts of a batch. Multiply it by the weight: "
            "jdp.Loss(total + penalty * weight, weight)."
        )

    def _for_global_loss(self, line: str) -> Choice:
        """Return auto for a loss that shards over the batch axes at `line`; raise ValueError if it is to be manual."""
        if self.settings.requested is None:
            return Choice("auto", f"the loss names the axes of the batch at {line}, which it can under auto only")
        raise ValueError(
            f"Under partitioning='manual' a loss sees one device's rows and cannot shard over "
            f"{' or '.join(self.plan.batch_axes)}; it does at {line}. Leave those axes out there, or take "
            "partitioning='auto' or None."
        )

    def _calls(self, choice: Choice) -> int:
        """Return on how many parts of a batch the loss is called."""
        return self.settings.accumulate * (self.plan.batch_shards if choice.partitioning == "manual" else 1)

    def _calls_as_product(self, choice: Choice) -> str:
        sizes = [f"{axis}={self.plan.mesh.shape[axis]}" for axis in self.plan.batch_axes]
        sizes = sizes if choice.partitioning == "manual" else []
        count = self.settings.accumulate
        return " × ".join([*sizes, *([f"accumulate={count}"] if count > 1 else [])])

    def _drawback(self, state: AnyState) -> str | None:
        """Describe what the user may not expect of the requested partitioning; None if there is nothing."""
        if self.settings.requested == "auto":
            return dtype_breach(self.settings.precision) or self._leaf_breach
        if names := _unsynchronised(state, floating=True):
            return f"each device then computes {names[0]} over its own rows, and the values are averaged"
        return None


def _unsynchronised(state: AnyState, floating: bool = False) -> tuple[str, ...]:
    """Return the paths of model state that calls may change, without batch norms' statistics; `floating`: floats."""
    adapter = state.static.adapter
    if adapter is None:
        return ()
    return adapter.unsynchronised_floats if floating else adapter.unsynchronised
