"""The metrics of evaluations: `train.eval_metrics`, and all metric names that [train] may use.

`experiment` is an `Experiment`, whose module imports this one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import PlainValidator

from jdp.base.errors import UserError
from jdp.base.toml import cut
from jdp.base.words import nearest
from jdp.experiment.schema.data import ARRAYS, words_of
from jdp.models.configs import GPTConfig

PERPLEXITY, BITS_PER_BYTE, ACCURACY = "perplexity", "bits_per_byte", "accuracy"
_TOP = re.compile(r"top([1-9][0-9]{0,8})_accuracy")
_RULE = 'must be an array of "perplexity", "bits_per_byte", "accuracy", "top5_accuracy" (or another number)'


def _metrics(metrics: Any) -> Any:
    names = [metrics] if isinstance(metrics, str) else metrics
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UserError(_RULE)
    known = (PERPLEXITY, BITS_PER_BYTE, ACCURACY, "top5_accuracy")
    for name in names:
        if name not in known and not _TOP.fullmatch(name):
            raise UserError(f"{_RULE}; it has {cut(repr(name))}{nearest(name, known)}")
    if len({*names}) < len(names):
        raise UserError("must name each metric once")
    return tuple(names)


EvalMetrics = Annotated[tuple[str, ...], PlainValidator(_metrics)]


def tops(metrics: Sequence[str]) -> dict[str, int]:
    """Return the k of each top-k accuracy among the metrics: name -> k."""
    matches = {name: _TOP.fullmatch(name) for name in metrics}
    accuracy = {ACCURACY: 1} if ACCURACY in metrics else {}
    return accuracy | {name: int(match[1]) for name, match in matches.items() if match}


def eval_metrics(experiment: Any) -> tuple[str, ...]:
    """Return the names of an evaluation's metrics: "eval_…" of the held-out data, "eval_NAME_…" of the held-out side of
    [data.mixture.NAME] and of [eval.NAME]."""
    usual, own = ("bits_per_token",) if experiment.in_bits else (ACCURACY,), experiment.loss.measured
    names = dict.fromkeys(("loss", *(usual if own is None else own), *experiment.train.eval_metrics))
    sets = ("eval", *(f"eval_{name}" for name in _named_sets(experiment)))
    return tuple(f"{prefix}_{name}" for prefix in sets for name in names)


def metric_problems(experiment: Any) -> Iterator[str]:
    """Yield the problems of the metrics of [train]."""
    yield from _eval_metrics_problems(experiment)
    train, known = experiment.train, eval_metrics(experiment)
    if train.best_metric not in known:
        given = f"{cut(repr(train.best_metric))}{nearest(train.best_metric, known)}"
        yield f"train.keep_best must be a metric of the evaluations, {', '.join(known)}; given {given}"
    if train.stop_after and not train.eval_every:
        yield (
            f"train.stop_after = {train.stop_after} counts evaluations, but the only one is at the end: "
            "set train.eval_every"
        )


def _eval_metrics_problems(experiment: Any) -> Iterator[str]:
    metrics, kind, config = experiment.train.eval_metrics, experiment.kind, experiment.model.config
    if not metrics:
        return
    if kind == "own" or experiment.loss.make:
        own = f"data.make = {experiment.data.make!r}" if kind == "own" else experiment.loss.chosen
        yield f"train.eval_metrics is for jdp's cross-entropies; given {own}, which has its own metrics: remove the key"
        return
    name, known = experiment.model.chosen, tops(metrics)
    of_text = [metric for metric in (PERPLEXITY, BITS_PER_BYTE) if metric in metrics]
    if of_text and kind != "text":
        yield f'train.eval_metrics has "{of_text[0]}", which is for text; {name} learns classes: remove it'
    outputs = next(getattr(config, key) for key in ("vocab_size", "classes", "features_out") if hasattr(config, key))
    for metric, count in known.items():
        if metric.removesuffix(f"_{ACCURACY}") in _named_sets(experiment):
            yield f'train.eval_metrics has "{metric}", but eval_{metric} belongs to a data set too: rename the data set'
        if count > outputs:
            yield f'train.eval_metrics has "{metric}", but the model has {outputs} outputs: lower the number'
    if kind == "text" and known and not isinstance(config, GPTConfig):
        yield f"train.eval_metrics has accuracies, but {name} returns no logits: remove them"
    words = [word for table in experiment.eval.values() for word in words_of(table.source)]
    are_tokens = not experiment.data.ids and any(word.endswith(ARRAYS) for word in words)
    if kind == "text" and BITS_PER_BYTE in metrics and (are_tokens or not experiment.data.knows_text):
        yield f'train.eval_metrics has "{BITS_PER_BYTE}", which needs a tokenizer; given token ids: take "{PERPLEXITY}"'


def _named_sets(experiment: Any) -> tuple[str, ...]:
    return (*experiment.data.mixture, *experiment.eval)
