"""The tables [train], [loss], [optimizer], [sample] and [guard]: a run, its update, its outputs and its checks."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator

from jdp.base.errors import UserError
from jdp.base.toml import cut
from jdp.base.words import nearest
from jdp.experiment.keys import OnlyFor
from jdp.experiment.schema.fields import (
    AboveZero,
    Address,
    Batches,
    Best,
    Count,
    Decay,
    Fraction,
    PathText,
    Patterns,
    Positive,
    Prompts,
    Section,
    Single,
    words_of,
)
from jdp.experiment.schema.make import Made

OF_TEXT = PERPLEXITY, BITS_PER_BYTE = "perplexity", "bits_per_byte"
ACCURACY = "accuracy"
_TOP = re.compile(r"top([1-9][0-9]{0,8})_accuracy")
_RULE = 'must be an array of "perplexity", "bits_per_byte", "accuracy", "top5_accuracy" (or another number)'


def _metrics(metrics: Any) -> Any:
    names = [metrics] if isinstance(metrics, str) else metrics
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UserError(_RULE)
    known = (*OF_TEXT, ACCURACY, "top5_accuracy")
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


def _measures(x: Any) -> bool:
    """Return True if jdp's own loss gives the metrics; it ranks the tokens of its GPTs, and all classes."""
    ranks = x.model.is_gpt or x.kind != "text"
    return x.kind != "own" and not x.loss.make and (ranks or not tops(x.train.eval_metrics))


class Train(Section):
    """[train]: which parameters, how long, how much at a time, how often."""

    steps: Positive
    """Optimizer steps in the whole run."""
    batch_size: Positive
    """Samples per step, over all devices and microbatches. A resumed run may change it: samples, steps and the
    learning rate continue."""
    accumulate: Positive = 1
    """Microbatches per step."""
    wrt: Patterns = None
    """Parameters to train: a path pattern such as "*/lora_*" (`*` matches slashes too), or an array of patterns. The
    others are frozen and have no gradients or optimizer state. none = all."""
    init_from: PathText | None = None
    """Initial parameters: the folder of a run (its newest checkpoint), a checkpoint, a .safetensors file or a folder
    with model.safetensors, under jdp's or Hugging Face's names. Missing LoRA parameters start fresh, missing tokens as
    the mean of the others. Paths as in data.source; none = random."""
    log_every: Positive = 10
    """Steps between lines of metrics."""
    wandb: Annotated[str, Field(min_length=1)] | None = None
    """Weights & Biases project, or ENTITY/PROJECT, in addition to metrics.jsonl and TensorBoard events;
    WANDB_MODE=offline writes to the run's folder."""
    eval_every: Count = 0
    """Steps between evaluations; 0 = only at the end."""
    eval_batches: Batches = 10
    """Largest number of batches that an evaluation reads of each data set: always the same random ones; "all" = every
    example once."""
    eval_metrics: Annotated[EvalMetrics, OnlyFor("jdp's own losses, which are cross-entropies", _measures)] = ()
    """Metrics besides the loss. Text: "perplexity", "bits_per_byte" (of UTF-8), and "accuracy" of the next token. Text
    and classes: "top5_accuracy" (or another number): how often the label is among the five most likely."""
    stop_after: Count = 0
    """Stop early after this many evaluations in a row without a better eval_loss, or metric of keep_best; 0 = never."""
    checkpoint_every: Count = 0
    """Steps between checkpoints; 0 = only at the end."""
    mirror: Address | None = None
    """Address to which checkpoints are copied in the background: s3://bucket/run, gs://bucket/run, or another storage
    of fsspec. A run resumes from the mirror if its own newest checkpoint is older; none = no mirror."""
    keep_checkpoints: Positive = 3
    """Number of the newest checkpoints to keep."""
    keep_best: Best = False
    """Also keep the checkpoint of the best evaluation: true (by eval_loss), or a metric. Larger is better for
    accuracies, smaller for all other metrics."""
    export: Annotated[Literal["hf"] | None, OnlyFor("a GPT", lambda x: x.model.is_gpt)] = None
    """"hf" writes the model to export/ in the run's folder at the end of training, in Hugging Face's format: the best
    checkpoint with keep_best, else the last; averaged weights if the run has them, LoRA's updates added. none = no
    export."""
    export_dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, OnlyFor("train.export", lambda x: x.train.export)
    ] = None
    """Dtype of the weights in the export; none = that of the Hugging Face model in train.init_from, else fp32."""

    @property
    def best_metric(self) -> str:
        """The metric for the best checkpoint and early stopping."""
        return self.keep_best if isinstance(self.keep_best, str) else "eval_loss"


class Sample(Section):
    """[sample]: text that the model writes during the run and at its end, into samples/; without the table, none. The
    seed fixes the draws, so `jdp generate RUN --step N` writes the text of step N."""

    prompt: Prompts = "\n"
    """Text to continue, or an array of texts."""
    every: Count = 0
    """Steps between samples; 0 = only at the end."""
    length: Positive = 200
    """Most tokens to add; fewer if the model's context has no room for them."""

    @property
    def prompts(self) -> tuple[str, ...]:
        return words_of(self.prompt)


class Guard(Section):
    """[guard]: checks during a run. A resumed run may change them."""

    deadline_seconds: Count = 300
    """Seconds within which a step must end, or ten times the median step if that is longer; else all processes report
    where they are and exit with code 75 (run again); 0 = no deadline. Restores, saves, and steps that compile (the
    first step, the first batch of an evaluation) may take twelve times as long."""
    keep_in_memory: Count = 0
    """Steps between copies of the state to the hosts' memory (/dev/shm, or $JDP_MEMORY_DIR), each part on two hosts. A
    restart resumes from them, even on fewer hosts; 0 = none."""
    check_replicas_every: Count = 100
    """Steps between bit-for-bit comparisons of the replicas on different devices; they are also compared before each
    checkpoint, so that no checkpoint holds a wrong copy. If a device differs, the run ends with exit code 78 and names
    its host. 0 = never."""

    @property
    def first_deadline_seconds(self) -> int:
        """The deadline of a compilation, a restore or a save."""
        return 12 * self.deadline_seconds


RuleName = Literal["adamw", "adam", "lion", "sgd", "adafactor", "lamb", "lars", "rmsprop", "adagrad", "muon"]


def _used_by(*names: RuleName) -> OnlyFor:
    """Mark a key that these update rules read."""
    return OnlyFor(", ".join(names), lambda x: x.optimizer.name in names, ", not {x.optimizer.name}")


class Optimizer(Made):
    """[optimizer]: the update rule and its learning rate over the run. Or `make`, a function of (schedule, keywords)
    that returns an optax.GradientTransformation; schedule is the learning rate by step."""

    _shared: ClassVar = ("lr", "warmup_steps", "schedule", "final_lr_fraction", "ema_decay", "clip_norm")
    _arguments: ClassVar[tuple[str, ...]] = ("schedule",)

    name: RuleName = "adamw"
    """The update rule."""
    lr: AboveZero = 3e-4
    """Peak learning rate."""
    warmup_steps: Count = 0
    """Steps over which the rate rises linearly to its peak."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up, until the last step."""
    final_lr_fraction: Annotated[
        Fraction, OnlyFor("the schedules cosine and linear", lambda x: x.optimizer.schedule != "constant")
    ] = 0.0
    """Final learning rate as a share of the peak."""
    weight_decay: Annotated[
        float, Field(ge=0), Single, _used_by("adamw", "lion", "sgd", "adafactor", "lamb", "lars", "muon")
    ] = 0.0
    """Weight decay; not applied to biases and norm scales. Decoupled from the gradient, except in lars."""
    b1: Annotated[Decay, _used_by("adamw", "adam", "lion", "lamb", "muon")] = 0.9
    """Decay of the first moment."""
    b2: Annotated[Decay, _used_by("adamw", "adam", "lion", "lamb", "rmsprop", "muon")] = 0.999
    """Decay of the second moment."""
    eps: Annotated[AboveZero, _used_by("adamw", "adam", "lamb", "rmsprop", "adagrad", "muon")] = 1e-8
    """Added to the denominator."""
    momentum: Annotated[Decay, _used_by("sgd", "adafactor", "lars", "rmsprop")] = 0.0
    """Momentum; muon's is beta."""
    beta: Annotated[Decay, _used_by("muon")] = 0.95
    """Decay of the momentum that is orthogonalized, a Nesterov momentum."""
    adam_lr: Annotated[AboveZero | None, _used_by("muon")] = None
    """Peak learning rate of AdamW for all parameters except hidden matrices; none = lr."""
    ema_decay: Decay | None = None
    """Decay of a moving average of the parameters, used by evaluations and samples; none = no average."""
    clip_norm: AboveZero | None = None
    """Largest global gradient norm; larger gradients are scaled down to it."""


class LossTable(Made):
    """[loss]: the loss to minimise, by default the cross-entropy of the next token or the class. Or `make`, a function
    of (model, batch, rng, keywords) that returns a jdp.Loss."""

    _shared: ClassVar[tuple[str, ...]] = ("metrics",)
    _arguments: ClassVar[tuple[str, ...]] = ("model", "batch", "rng")

    metrics: Annotated[tuple[str, ...], OnlyFor("loss.make", lambda x: x.loss.make)] = ()
    """Names in jdp.Loss.metrics for early stopping and the best checkpoint. Larger is better for names that end in
    "accuracy", smaller for all others."""

    @property
    def chosen(self) -> str:
        """The key that chooses the loss, and its value, for messages."""
        return f"loss.make = {self.make!r}"
