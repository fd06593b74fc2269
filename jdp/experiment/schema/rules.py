"""The rules between the keys of an experiment file: a line for each broken rule, with keys, rule, value and fix.

`_unread` checks the fields' `OnlyFor` annotations, `_contradictions` the values of several keys. The plan checks
[rules], and the readers of data check columns. `x` is an `Experiment`, whose module imports this one.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from jdp.base.toml import brief
from jdp.base.words import nearest
from jdp.core.sharding.axes import REPLICA
from jdp.experiment.keys import OnlyFor
from jdp.experiment.schema.data import ARRAYS
from jdp.experiment.schema.fields import words_of
from jdp.experiment.schema.model import NEEDED
from jdp.experiment.schema.train import BITS_PER_BYTE, OF_TEXT, tops

_TAKES = {
    "text": 'a GPT learns text: write source = "stdlib", or name files or folders of text',
    "images": 'a ResNet or ViT learns images: write source = "digits", "hf:imagefolder:FOLDER", or an .npz',
    "features": 'an MLP learns vectors: write source = "features.npz", or images: "digits", "hf:imagefolder:FOLDER"',
}


def broken_rules(x: Any) -> Iterator[str]:
    """Yield a line for every rule between keys that is broken."""
    model, kinds = x.model, ", ".join(NEEDED)
    if model.kind is None and (tables := [key for key in ("data", "loss") if getattr(x, key).make is None]):
        yield f"{model.chosen} needs {tables[0]}.make beside it, or learns jdp's own data: model.learns = {kinds}"
    elif model.kind and (missing := [key for key in NEEDED[model.kind] if not hasattr(model.config, key)]):
        yield f"{model.chosen} learns {model.kind} and lacks the keywords {', '.join(missing)}: add them to it"
    else:  # the other rules need these
        yield from (*_unread(x, x), *_contradictions(x))


def _unread(x: Any, table: BaseModel, prefix: str = "") -> Iterator[str]:
    """Yield a line for each key that is set although nothing reads it: the file would not describe the run."""
    for name, field in type(table).model_fields.items():
        key, value = f"{prefix}{name}", getattr(table, name)
        shown, ending = (f"[{key}]", "") if isinstance(value, BaseModel | dict) else (key, f"; given {brief(value)}")
        for only in (rule for rule in field.metadata if isinstance(rule, OnlyFor)):
            if value != field.default and not only.is_read(x):
                yield f"{shown} is for {only.readers}{only.instead.format(x=x)}{ending}: remove it"
        if isinstance(value, BaseModel):
            yield from _unread(x, value, f"{key}.")


def _contradictions(x: Any) -> Iterator[str]:
    """Yield a line for each value that contradicts the value of another key."""
    data, train, config, known = x.data, x.train, x.model.config, x.eval_metrics
    if x.kind != "own":
        if (data.source is None) != bool(data.mixture):
            yield 'data.source and [data.mixture.NAME] exclude each other: give one of them (or source = "none")'
        yield from _unfit(x)
    if x.kind == "text" and data.length > config.context:
        yield f"data.length = {data.length} must be at most model.context = {config.context}: lower it, or raise that"
    if twice := [metric for metric in known if known.count(metric) > 1]:
        yield f"{twice[0]} is a metric of two evaluations: rename a table of [data.mixture] or [eval]"
    if (best := train.best_metric) not in known:
        yield f"train.keep_best = {best!r} must be a metric of evaluations, {', '.join(known)}{nearest(best, known)}"
    if train.stop_after and not train.eval_every:
        yield f"train.stop_after = {train.stop_after} counts evaluations during training: set train.eval_every"
    if (warmup := x.optimizer.warmup_steps) > train.steps:
        yield f"optimizer.warmup_steps = {warmup} must be at most train.steps = {train.steps}: lower it, or raise that"
    axes = [axis for axis in x.mesh if axis != REPLICA]  # replica shards the batch only
    for pattern, entries in x.rules.items():
        named = {axis for entry in entries for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis}
        for axis in sorted(named.difference(axes)):
            yield (
                f'rules."{pattern}" must name axes of [mesh] other than replica: {", ".join(axes)}; given {axis!r}: '
                "name one of these, or add it to [mesh]"
            )


def _unfit(x: Any) -> Iterator[str]:
    """Yield a line for each source that does not fit the model, and each metric that does not fit the two."""
    metrics, sets = x.train.eval_metrics, {f"eval.{name}": table for name, table in x.eval.items()}
    tables = {"data": x.data, **{f"data.mixture.{name}": part for name, part in x.data.mixture.items()}, **sets}
    word = "digits" if x.kind == "text" else "stdlib"
    for key in (key for key, table in tables.items() if word in words_of(table.source)):
        yield f"{key}.source must fit {x.model.chosen}; given {word!r}, and {_TAKES[x.kind]}"
    if x.kind == "text" and not x.data.ids and BITS_PER_BYTE in metrics:
        for key in (key for key, table in sets.items() if any(w.endswith(ARRAYS) for w in words_of(table.source))):
            yield f"{BITS_PER_BYTE} needs text; {key}.source is token ids: remove the metric"
    for metric in (metric for metric in metrics if metric in OF_TEXT and x.kind != "text"):
        yield f'train.eval_metrics has "{metric}", which is for text, and {x.model.chosen} learns {x.kind}: remove it'
    outputs = getattr(x.model.config, {"text": "vocab_size", "images": "classes", "features": "features_out"}[x.kind])
    for metric in (metric for metric, count in tops(metrics).items() if count > outputs):
        yield f'train.eval_metrics has "{metric}", but the model has {outputs} outputs: lower the number'
