"""Rules between the tables of an experiment file: each that is broken is one line, with the keys, the rule and the fix.

What kind of data a model learns decides which keys of [data] mean something: a GPT reads text (or tokens from an .npz),
a ResNet or ViT images, an MLP vectors of features, from an .npz or from images laid flat.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from jdp.mesh import REPLICA
from jdp.models.gpt import GPTConfig
from jdp.models.least import least_parameters, traced_layers
from jdp.models.mlp import MLPConfig
from jdp.schema.data import Data
from jdp.schema.kinds import NONE
from jdp.schema.optimizer import unused
from jdp.toml import cut
from jdp.wording import nearest

if TYPE_CHECKING:
    from jdp.schema import Experiment

Kind = Literal["text", "images", "features"]
OTHERS_KEYS = {
    "text": ("label", "heldout", "size"),
    "images": ("mixture", "tokenizer", "packing", "length", "size"),
    "features": ("mixture", "tokenizer", "packing", "length"),
}
"""kind -> the keys of [data] that only other kinds read."""
MOST_PARAMETERS = 2**50
MOST_TRACED = 10_000
ARRAYS = ".npz"
_WORDS = {"text": ("stdlib",), "images": ("digits",), "features": ("digits",)}
_TAKES = {
    "text": ('text: write source = "stdlib", or name files or folders of text', "a GPT learns text"),
    "images": (
        'images: write source = "digits", a folder with a subfolder for each class, or "hf:NAME"',
        "a ResNet or ViT learns images",
    ),
    "features": (
        'features: write source = "features.npz", or images: "digits", a folder with a subfolder for each class',
        "an MLP learns vectors",
    ),
}


def kind_of(experiment: Experiment) -> Kind:
    """What the model learns from."""
    config = experiment.model.config
    return "text" if isinstance(config, GPTConfig) else "features" if isinstance(config, MLPConfig) else "images"


def eval_metrics(experiment: Experiment) -> tuple[str, ...]:
    """The metrics an evaluation gives: of the held-out data, of that of each text of a mixture, of each [eval.NAME]."""
    own = ("loss", "bits_per_token") if kind_of(experiment) == "text" else ("loss", "accuracy")
    sets = ("eval", *(f"eval_{name}" for name in (*experiment.data.mixture, *experiment.eval)))
    return tuple(f"{prefix}_{name}" for prefix in sets for name in own)


def disagreements(experiment: Experiment) -> Iterator[str]:
    """Every rule between keys that is broken."""
    yield from _size(experiment)
    yield from _lengths(experiment)
    yield from unused(experiment.optimizer)
    yield from _data(experiment)
    yield from _metrics(experiment)
    yield from _rules(experiment)
    if experiment.train.init_names != "jdp" and (experiment.train.init_from is None or kind_of(experiment) != "text"):
        yield "train.init_names is for a GPT's weights from a safetensors file, train.init_from: give one, or remove it"
    if experiment.sample and kind_of(experiment) != "text":
        yield f"[sample] is text written by a GPT; model.name = {experiment.model.name!r} writes none: remove the table"


def _size(experiment: Experiment) -> Iterator[str]:
    """Models that no machine holds, or whose tracing does not end: tracing one would be the end of the process."""
    config, name = experiment.model.config, experiment.model.name
    if (count := least_parameters(config)) > MOST_PARAMETERS:
        power = int((count.bit_length() - 1) * math.log10(2))
        yield f"model has more than 10^{power} parameters, which no machine holds: lower the sizes in [model]"
    if (layers := traced_layers(config)) > MOST_TRACED:
        scanned = " (scan = true has no such limit)" if hasattr(config, "scan") else ""
        rule = f"model.name = {name!r} takes at most {MOST_TRACED:,} layers, as they are compiled one by one"
        yield f"{rule}; given {layers:,}{scanned}"


def _lengths(experiment: Experiment) -> Iterator[str]:
    """Problems between the lengths that several tables state."""
    context = getattr(experiment.model, "context", math.inf)
    length, warmup, steps = experiment.data.length, experiment.optimizer.warmup_steps, experiment.train.steps
    if length > context:
        yield f"data.length must be at most model.context = {context}; given {length}: lower it, or raise model.context"
    if warmup > steps:
        yield f"optimizer.warmup_steps must be at most train.steps = {steps}; given {warmup}: lower it, or train longer"


def _data(experiment: Experiment) -> Iterator[str]:
    """Problems between the model and its data that show without reading it."""
    data, kind, name = experiment.data, kind_of(experiment), experiment.model.name
    for twice in sorted(data.mixture.keys() & experiment.eval.keys()):
        yield f"eval.{twice} has the name of data.mixture.{twice}, whose held-out text is evaluated as that: rename one"
    if data.tokenizer == NONE and experiment.sample:
        yield '[sample] needs a tokenizer, and data.tokenizer is "none" (token ids): name the one that made them'
    tokens = any(source.endswith(ARRAYS) for source in data.sources)
    if data.source is None and not data.mixture:
        yield "data.source is none, and there is no [data.mixture.NAME] in its place: give one of them"
    if data.source is not None and data.mixture:
        yield 'data.source and [data.mixture.NAME] exclude each other: remove one (or source = "none")'
    if kind == "text" and tokens and (experiment.sample or len(data.sources) > 1):
        yield f"data.source is an {ARRAYS} of tokens: it stands alone, and [sample] needs text; remove one of them"
    fix, why = _TAKES[kind]
    for key, sources in _sources(experiment):
        for source in sources:
            if _other_kind(source, kind):
                yield f"{key} must fit model.name = {name!r}: {why}; given {cut(repr(source))}, which is not {fix}"
    for key in OTHERS_KEYS[kind]:
        default = Data.model_fields[key].default
        if getattr(data, key) != default:
            given = cut(repr(getattr(data, key)))
            yield f"data.{key} is not used by model.name = {name!r}, as {why}; given {given}: remove it"


def _sources(experiment: Experiment) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "data.source", experiment.data.sources
    for name, one in experiment.eval.items():
        yield f"eval.{name}.source", (one.source,) if isinstance(one.source, str) else one.source


def _other_kind(source: str, kind: Kind) -> bool:
    """Whether a source says by its name that it is another kind of data."""
    words = {word for one in _WORDS.values() for word in one} - {*_WORDS[kind]}
    return source in words


def _metrics(experiment: Experiment) -> Iterator[str]:
    """Metrics that are asked for and no evaluation gives."""
    train, known = experiment.train, eval_metrics(experiment)
    asked = {"stop_metric": train.stop_metric, "keep_best": train.keep_best if train.keep_best is not True else None}
    for key, metric in asked.items():
        if metric and metric not in known:
            given = f"{cut(repr(metric))}{nearest(str(metric), known)}"
            yield f"train.{key} must be a metric of the evaluations, {', '.join(known)}; given {given}"
    if train.stop_after and not train.eval_every:
        yield (
            f"train.stop_after = {train.stop_after} counts evaluations, but there is one at the end only: "
            "set train.eval_every"
        )


def _rules(experiment: Experiment) -> Iterator[str]:
    """Rules that name an axis the mesh has not, or the one that only carries the batch."""
    for pattern, entries in experiment.rules.items():
        flat = {axis for entry in entries for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis}
        for axis in sorted(flat - set(experiment.mesh)):
            axes = ", ".join(experiment.mesh)
            yield f'rules."{pattern}" must name axes of [mesh], which are {axes}; given {axis!r}: add it to [mesh]'
        if REPLICA in flat & set(experiment.mesh):
            yield f'rules."{pattern}" names `replica`, which carries the batch only: use data, or an axis of the model'
