"""Evaluation during a run: every data set in turn, each example once, and the best result so far.

Batches are always the same: all examples; or, if `eval_batches` is a number, that many batches, drawn with a fixed
seed. A step returns means and their weights; Σ mean · weight / Σ weight is the mean over examples for any batch sizes,
because padding has weight 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from jdp.core.state import TrainState
from jdp.core.step import Step, make_eval_step
from jdp.data import Source, batch_count
from jdp.data.batches import sample_index
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError
from jdp.experiment.losses import eval_loss_of
from jdp.experiment.schema.fields import ALL
from jdp.experiment.schema.tables import BITS_PER_BYTE, PERPLEXITY
from jdp.run.metrics import numbers

Row = dict[str, float]


@dataclass(frozen=True)
class Evaluation:
    """Evaluates every data set of a run."""

    assembly: Assembly

    @cached_property
    def step(self) -> Step:
        """The evaluation step: means of the metrics over a batch, and their weight."""
        training = self.assembly.training
        return make_eval_step(eval_loss_of(self.assembly.experiment), training.plan, **training.step_options)

    def of(self, state: TrainState, goes_on: Callable[[], bool] = lambda: True) -> Row | None:
        """Return the metrics of all data sets, by the averaged parameters if the run has them
        (`optimizer.ema_decay`); None if the run stops meanwhile."""
        state, experiment = self.assembly.training.averaged(state), self.assembly.experiment
        row: Row = {}
        for name, source in self.assembly.inputs.eval_sets.items():
            means = self._means(name, state, source, goes_on)
            if means is None:
                return None
            row |= {f"{name}_{metric}": value for metric, value in means.items()}
        if missing := [metric for metric in experiment.eval_metrics if metric not in row]:
            raise ExperimentError(
                f"loss.make = {experiment.loss.make!r} must give the metrics of loss.metrics; given {', '.join(row)}, "
                f"without {missing[0]}: add it to jdp.Loss, or take it from the list"
            )
        return row

    @property
    def coverage(self) -> str | None:
        """The evaluations that read only a part of their data; None if all read everything."""
        most, size = self.assembly.experiment.train.eval_batches, self.assembly.experiment.train.batch_size
        sets = self.assembly.inputs.eval_sets.items()
        counts = {name: batch_count(source, batch_size=size) for name, source in sets}
        partial = [f"{name} {most} of {n} batches" for name, n in counts.items() if most != ALL and n > most]
        return f'evaluations read {", ".join(partial)} (train.eval_batches = "{ALL}" reads all)' if partial else None

    def _means(self, name: str, state: TrainState, source: Source, goes_on: Callable[[], bool]) -> Row | None:
        """Return Σ mean · weight / Σ weight of each metric over the batches of one data set; None if the run stops."""
        totals, weights = defaultdict[str, float](float), defaultdict[str, float](float)
        most = self.assembly.experiment.train.eval_batches
        limit = None if isinstance(most, str) else most
        with self.assembly.inputs.feed(source, seed=0, shuffle=most != ALL, epochs=1, most=limit) as batches:
            for batch in batches:
                values = numbers(self.step(state, batch))
                for metric in values.keys() - {"weight", *(f"{name}_weight" for name in values)}:
                    share = values.get(f"{metric}_weight", values["weight"])
                    totals[metric] += values[metric] * share if share else 0.0
                    weights[metric] += share
                if not goes_on():
                    return None
        if not weights["loss"]:
            more = "" if limit is None else f', or set train.eval_batches = "{ALL}"'
            raise ExperimentError(
                f"an evaluation needs weights above 0; given {name}, with weight 0 in all rows that were read: correct "
                f"its weights{more}"
            )
        order = sorted(totals, key=lambda each: (each != "loss", each))
        means = {metric: totals[metric] / weights[metric] if weights[metric] else math.nan for metric in order}
        if self.assembly.experiment.in_bits:
            asked, bits = self.assembly.experiment.train.eval_metrics, means["loss"] / math.log(2)
            means["bits_per_token"] = bits
            if PERPLEXITY in asked:
                means[PERPLEXITY] = float(np.exp(np.float64(means["loss"])))
            if BITS_PER_BYTE in asked:
                count = self._text_bytes[name]
                means[BITS_PER_BYTE] = bits * weights["loss"] / count if count else math.nan
        return means

    @cached_property
    def _text_bytes(self) -> dict[str, float]:
        """For each data set, the bytes of text of the targets that are read, times their weights; each sample once."""
        train, inputs = self.assembly.experiment.train, self.assembly.inputs
        sizes, counts = inputs.data.tokenizer.byte_counts(), dict[str, float]()
        for name, source in inputs.eval_sets.items():
            samples, most = len(source), train.eval_batches
            read = samples if isinstance(most, str) else min(samples, most * train.batch_size)
            drawn = (source[sample_index(0, samples, i)] for i in range(read))
            learnt = ((sample["targets"], sample["weights"], sample["weights"] > 0) for sample in drawn)
            counts[name] = sum(float(sizes[targets[used]] @ weights[used]) for targets, weights, used in learnt)
        return counts


@dataclass
class Best:
    """The best evaluation so far by one metric."""

    metric: str
    value: float | None = None  # None before the first evaluation
    step: int = 0  # of the best evaluation
    waiting: int = 0  # evaluations since then

    @property
    def mode(self) -> Literal["min", "max"]:
        """Whether the largest or the smallest value is the best: "max" or "min"."""
        return "max" if self.metric.endswith("accuracy") else "min"

    def seen(self, step: int, row: Row, *, newest: bool = False) -> bool:
        """Record an evaluation, and return True if it is the best so far.

        The first of equal values is the best; with `newest` the last, which `jdp.Checkpoints` keeps.
        """
        value, best = row[self.metric], self.value
        is_better = best is None or (value > best if self.mode == "max" else value < best)
        improved = math.isfinite(value) and is_better
        if improved or (newest and value == best):
            self.value, self.step = value, step
        self.waiting = 0 if improved else self.waiting + 1
        return improved

    def no_improvement(self) -> str:
        """Return why a run stops early, in words."""
        if self.value is None:
            return f"{self.metric} has not been finite in {self.waiting} evaluations"
        return (
            f"{self.metric} has not improved in {self.waiting} evaluations; its best was {self.value:.6g} at step "
            f"{self.step}"
        )

    @staticmethod
    def resumed(metric: str, recorded: Best | None) -> Best:
        """Return what a checkpoint recorded; a new `Best` if that is of another metric."""
        return recorded if recorded is not None and recorded.metric == metric else Best(metric)
