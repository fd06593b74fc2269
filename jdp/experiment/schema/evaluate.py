"""The table [evaluate], and the names of an evaluation's metrics, which [train] may go by."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Protocol

from pydantic import PlainValidator

from jdp.base.hints import nearest
from jdp.base.shorten import cut
from jdp.experiment.schema.data import Data, EvalSet
from jdp.experiment.schema.fields import Section
from jdp.experiment.schema.model import Model
from jdp.experiment.schema.optimizer import LossTable
from jdp.experiment.schema.train import Train
from jdp.models.configs.gpt import GPTConfig

PERPLEXITY, BITS_PER_BYTE, ACCURACY = "perplexity", "bits_per_byte", "accuracy"
_TOP = re.compile(r"top([1-9][0-9]{0,8})_accuracy")
_RULE = 'must be an array of "perplexity", "bits_per_byte", "accuracy", "top5_accuracy" (or another number)'


def _metrics(given: Any) -> Any:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(_RULE)
    known = (PERPLEXITY, BITS_PER_BYTE, ACCURACY, "top5_accuracy")
    for name in names:
        if name not in known and not _TOP.fullmatch(name):
            raise ValueError(f"{_RULE}; it has {cut(repr(name))}{nearest(name, known)}")
    if len({*names}) < len(names):
        raise ValueError("must name each metric once")
    return tuple(names)


class Evaluate(Section):
    """[evaluate]: what every evaluation measures of each data set, beside the loss."""

    metrics: Annotated[tuple[str, ...], PlainValidator(_metrics)] = ()
    """More metrics. Text: "perplexity", "bits_per_byte" (of UTF-8), and "accuracy" of the next token. Text and classes:
    "top5_accuracy", or another number: how often the label is among so many likeliest."""

    @property
    def tops(self) -> dict[str, int]:
        """The accuracies that are measured by rank: name -> how many likeliest."""
        found = {name: _TOP.fullmatch(name) for name in self.metrics}
        accuracy = {ACCURACY: 1} if ACCURACY in self.metrics else {}
        return accuracy | {name: int(match[1]) for name, match in found.items() if match}


class File(Protocol):
    """What the names of metrics, and the rules about them, are read from: an experiment."""

    @property
    def evaluate(self) -> Evaluate: ...
    @property
    def train(self) -> Train: ...
    @property
    def data(self) -> Data: ...
    @property
    def eval(self) -> Mapping[str, EvalSet]: ...
    @property
    def loss(self) -> LossTable: ...
    @property
    def model(self) -> Model: ...
    @property
    def kind(self) -> str: ...
    @property
    def in_bits(self) -> bool: ...


def eval_metrics(experiment: File) -> tuple[str, ...]:
    """Return the names of an evaluation's metrics: "eval_…" of the held-out data, "eval_NAME_…" of the held-out side of
    [data.mixture.NAME] and of [eval.NAME]."""
    usual, own = ("bits_per_token",) if experiment.in_bits else (ACCURACY,), experiment.loss.measured
    names = dict.fromkeys(("loss", *(usual if own is None else own), *experiment.evaluate.metrics))
    sets = ("eval", *(f"eval_{name}" for name in _named_sets(experiment)))
    return tuple(f"{prefix}_{name}" for prefix in sets for name in names)


def metric_problems(experiment: File) -> Iterator[str]:
    """Yield what is wrong with [evaluate], and with requested metrics that no evaluation has."""
    yield from _evaluate(experiment)
    train, known = experiment.train, eval_metrics(experiment)
    if train.best_metric not in known:
        given = f"{cut(repr(train.best_metric))}{nearest(train.best_metric, known)}"
        yield f"train.keep_best must be a metric of the evaluations, {', '.join(known)}; given {given}"
    if train.stop_after and not train.eval_every:
        yield (
            f"train.stop_after = {train.stop_after} counts evaluations, but there is one at the end only: "
            "set train.eval_every"
        )


def _evaluate(experiment: File) -> Iterator[str]:
    given, kind = experiment.evaluate, experiment.kind
    if given == Evaluate():
        return
    if kind == "own" or experiment.loss.measured is not None:
        of = f"data.make = {experiment.data.make!r}" if kind == "own" else experiment.loss.chosen
        yield f"[evaluate] is measured beside jdp's cross-entropies; given {of}, which has its own metrics: remove it"
        return
    name, is_text = experiment.model.chosen, kind == "text"
    for metric in (PERPLEXITY, BITS_PER_BYTE):
        if metric in given.metrics and not is_text:
            yield f'evaluate.metrics has "{metric}", which is of text; {name} learns classes: remove it'
    for metric in given.tops:
        if (other := metric.removesuffix(f"_{ACCURACY}")) in _named_sets(experiment):
            yield f'evaluate.metrics has "{metric}", and a data set is named {other}: both are eval_{metric}; rename it'
    outputs = _outputs(experiment)
    for metric, count in given.tops.items():
        if count > outputs:
            yield f'evaluate.metrics has "{metric}", and the model tells {outputs} apart: lower the number'
    if not is_text:
        return
    if given.tops and not isinstance(experiment.model.config, GPTConfig):
        yield f"evaluate.metrics has accuracies, and {name} gives no logits: remove them"
    evaluated = (word for table in experiment.eval.values() for word in _several(table))
    arrays = not experiment.data.ids and any(map(_is_array, evaluated))
    if BITS_PER_BYTE in given.metrics and (arrays or not experiment.data.knows_text):
        yield f'evaluate.metrics has "{BITS_PER_BYTE}", which needs a tokenizer; given token ids: take "{PERPLEXITY}"'


def _named_sets(experiment: File) -> tuple[str, ...]:
    return (*experiment.data.mixture, *experiment.eval)


def _outputs(experiment: File) -> int:
    config: Any = experiment.model.config
    return next(getattr(config, key) for key in ("vocab_size", "classes", "features_out") if hasattr(config, key))


def _several(table: EvalSet) -> tuple[str, ...]:
    return (table.source,) if isinstance(table.source, str) else table.source


def _is_array(source: str) -> bool:
    return source.endswith(".npz")
