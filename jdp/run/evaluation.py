"""Evaluation during a run: every data set in turn, each example once, and the best result so far.

1. The held-out part of the data is "eval"; each [eval.NAME] is "eval_NAME". Batches are always the same: all examples
   once; or, if `eval_batches` is a number, that many batches, drawn from all examples with a fixed seed.
2. A step returns means and their weight; Σ mean · weight / Σ weight is the mean over examples for any batch sizes,
   because padding has weight 0.
3. `train.eval_metrics` adds metrics.
4. `Best` holds the best value of a metric, and the number of evaluations since.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jdp.core.state import TrainState
from jdp.data import Source, batch_count
from jdp.data.order import sample_index
from jdp.data.text.tokenizers import Tokenizer
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError
from jdp.experiment.schema.evaluate import BITS_PER_BYTE, PERPLEXITY
from jdp.experiment.schema.fields import ALL
from jdp.run.outputs.metrics import numbers

Row = dict[str, float]


def evaluate(assembly: Assembly, state: TrainState, goes_on: Callable[[], bool] = lambda: True) -> Row | None:
    """Evaluate every data set, with the averaged parameters if the run has them (`optimizer.ema_decay`).

    Return None if the run stops meanwhile.
    """
    state = assembly.averaged(state)
    row: Row = {}
    for name, source in assembly.eval_sets.items():
        means = _means(assembly, state, source, goes_on)
        if means is None:
            return None
        row |= {f"{name}_{metric}": value for metric, value in means.items()}
    if missing := [metric for metric in assembly.experiment.eval_metrics if metric not in row]:
        raise ExperimentError(
            f"{assembly.experiment.loss.chosen} must give the metrics of loss.metrics; given {', '.join(row)}, without "
            f"{missing[0]}: add it to jdp.Loss, or take it from the list"
        )
    return row


def coverage(assembly: Assembly) -> str | None:
    """Describe the evaluations that read only a part of their data; None if all read everything."""
    most, size = assembly.experiment.train.eval_batches, assembly.experiment.train.batch_size
    counts = {name: batch_count(source, batch_size=size) for name, source in assembly.eval_sets.items()}
    partial = [f"{name} {most} of {count} batches" for name, count in counts.items() if most != ALL and count > most]
    return f'evaluations read {", ".join(partial)} (train.eval_batches = "{ALL}" reads all)' if partial else None


def _means(assembly: Assembly, state: TrainState, source: Source, goes_on: Callable[[], bool]) -> Row | None:
    """Return Σ mean · weight / Σ weight of each metric over the batches of one data set; None if the run stops."""
    totals: Row = {}
    weight = 0.0
    most = assembly.experiment.train.eval_batches
    limit = None if isinstance(most, str) else most
    with assembly.feed(source, seed=0, shuffle=most != ALL, epochs=1, most=limit) as batches:
        for batch in batches:
            values = numbers(assembly.eval_step(state, batch))
            share = values.pop("weight")
            weight += share
            if share:
                totals = {name: totals.get(name, 0.0) + value * share for name, value in values.items()}
            if not goes_on():
                return None
    means = {name: totals[name] / weight for name in sorted(totals, key=lambda name: (name != "loss", name))}
    return means | _of_text(assembly, source, means["loss"], weight) if assembly.experiment.in_bits else means


def _of_text(assembly: Assembly, source: Source, loss: float, tokens: float) -> Row:
    """Return a text's loss in other units."""
    row, asked = {"bits_per_token": loss / math.log(2)}, assembly.experiment.train.eval_metrics
    if PERPLEXITY in asked:
        row[PERPLEXITY] = float(np.exp(np.float64(loss)))
    if BITS_PER_BYTE in asked:
        count = _bytes_evaluated(assembly, source)
        row[BITS_PER_BYTE] = row["bits_per_token"] * tokens / count if count else math.nan
    return row


def _bytes_evaluated(assembly: Assembly, source: Source) -> int:
    """Return the bytes of text that an evaluation reads, each sample counted once."""
    most, samples = assembly.experiment.train.eval_batches, len(source)
    if isinstance(most, str):
        indices = range(samples)
    else:  # in the order in which the evaluation draws them
        drawn = min(samples, most * assembly.experiment.train.batch_size)
        indices = [sample_index(0, samples, position) for position in range(drawn)]
    counted = _COUNTED.setdefault(source, {})
    if len(indices) not in counted:
        counted[len(indices)] = _text_bytes(source, indices, assembly.data.tokenizer)
    return counted[len(indices)]


def _text_bytes(source: Source, indices: Iterable[int], tokenizer: Tokenizer) -> int:
    """Return the bytes of text behind the targets of these samples that have a weight."""
    sizes = tokenizer.byte_counts()
    assert sizes is not None
    total = 0
    for index in indices:
        sample = source[index]
        total += int(sizes[sample["targets"][sample["weights"] > 0]].sum())
    return total


_COUNTED: weakref.WeakKeyDictionary[Source, dict[int, int]] = weakref.WeakKeyDictionary()
"""Bytes of a source's first samples, by their number."""


@dataclass
class Best:
    """The best evaluation so far by one metric.

    Attributes:
        metric: its name; larger is better for an accuracy.
        value, step: the best value and its step; None and 0 before the first evaluation.
        waiting: evaluations since then.
    """

    metric: str
    value: float | None = None
    step: int = 0
    waiting: int = 0

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
    def resumed(metric: str, record: dict[str, Any] | None) -> Best:
        """Restore the record of `dataclasses.asdict`; a new `Best` if the record is of another metric."""
        if not record or record["metric"] != metric:
            return Best(metric)
        return Best(**record)
