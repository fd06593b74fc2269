"""The tables beside [model]: data and evaluation sets, [train], [loss], [optimizer], [sample] and [guard]."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, model_validator

from jdp.base.errors import UserError
from jdp.base.toml import cut
from jdp.base.words import nearest
from jdp.experiment.keys import OnlyFor
from jdp.experiment.schema.fields import (
    NONE,
    AboveZero,
    Address,
    Batches,
    Best,
    Count,
    Decay,
    Fraction,
    MaybeSource,
    Part,
    PathText,
    Patterns,
    Positive,
    Prompts,
    Section,
    Single,
    Source,
    named,
    words_of,
)
from jdp.experiment.schema.make import Made
from jdp.experiment.schema.model import Learns


def _read_for(*kinds: Learns) -> OnlyFor:
    """Mark a key that is read for these kinds of data."""
    return OnlyFor(" and ".join(kinds), lambda x: x.kind in kinds, ", and {x.model.chosen} learns {x.kind}")


_TEXT = _read_for("text")


class Ingredient(Section):
    """[data.mixture.NAME]: one of several sources of text or images to train on. Its held-out side is also evaluated
    alone, as eval_NAME."""

    source: Source
    """As data.source."""
    weight: AboveZero = 1.0
    """Share of the samples, relative to the other ingredients."""
    field: str | None = None
    """As data.field; none = the same."""


class Data(Made):
    """[data]: the data set; the model decides whether to read text, images or tables of numbers. Or `make`, a function
    of keywords that returns a sequence (len and [index]) of dicts of arrays, or two: training and held-out samples."""

    _shared: ClassVar[tuple[str, ...]] = ("heldout_fraction", "shuffle")

    source: MaybeSource = "stdlib"
    """Source of the samples. Text: "stdlib" (the source code of Python's library), text files (.txt, .md, .rst, .py),
    globs or folders, or an .npz of tokens. Images: "digits" (scikit-learn's), or an .npz. Features of an MLP: an .npz,
    or images. `datasets` reads everything else: "hf:json:PATH" (or parquet, csv, arrow, imagefolder, webdataset),
    "hf:NAME" from the hub, or a split, "hf:imagefolder:PATH:train". "hf-stream:NAME:train[:100000]" tokenises text
    while fetching it, here the first 100000 rows. Tokens of 64 MiB of text or more are cached below JDP_CACHE_DIR
    (~/.cache/jdp). Paths are relative to the experiment file, on the command line to the working directory. "none" with
    [data.mixture.NAME]."""
    mixture: Annotated[dict[str, Ingredient], named("text"), _read_for("text", "images")] = Field(default={})
    """Several sources of text, or of images with the same classes, mixed by weight; replaces source."""
    field: Annotated[str | None, OnlyFor("text and arrays", lambda x: x.data.ids is None, ", not data.ids")] = None
    """Column or array to learn from; none = the usual: "text", the only images, "features"."""
    label: Annotated[str | None, _read_for("images", "features")] = None
    """Column or array of the classes; none = the usual: the only classes, "labels"."""
    ids: Annotated[str | None, _TEXT] = None
    """Column or array of token ids in place of text, such as "input_ids" in "hf:parquet:PATH" or an .npz.
    experiments/prepare/ makes them from text and chats."""
    weights: Annotated[str | None, _TEXT] = None
    """With ids: column of each token's weight as a target, 0 to 1, such as "loss_mask"; none = all count."""
    labels: Annotated[str | None, _TEXT] = None
    """With ids, in place of weights: column that repeats the ids, with -100 for tokens that do not count."""
    attention_mask: Annotated[str | None, _TEXT] = None
    """With ids: column that is 0 at padding tokens, which are left out."""
    tokenizer: Annotated[PathText, _TEXT] = "bytes"
    """Tokenizer of text: "bytes", or a tokenizer.json of Hugging Face tokenizers or its folder; paths as in source.
    Default: the tokenizer in the folder of a model "hf:FOLDER", else bytes. With ids: the tokenizer that made them."""
    packing: Annotated[Literal["stream", "documents"], _TEXT] = "stream"
    """How documents fill a sample: end to end and cut anywhere; or whole, each with its own attention and positions."""
    length: Annotated[Count, _TEXT] = 0
    """Tokens per sample; 0 = the model's context."""
    heldout: Annotated[
        PathText | None,
        _read_for("images", "features"),
        OnlyFor("one source", lambda x: not x.data.mixture, ", not [data.mixture.NAME]"),
    ] = None
    """Separate held-out set, named as in source; none = heldout_fraction of the source."""
    heldout_fraction: Part = 0.05
    """Share of the data held out for evaluation, chosen by content."""
    shuffle: bool = True
    """Reshuffle the training samples each epoch."""
    augment: Annotated[Literal["crop", "resized_crop"] | None, _read_for("images")] = None
    """Crop training images at random and flip half of them from left to right, differently in each epoch. "crop", for
    small images: pad each side with an eighth of black pixels, then crop to the image's size. "resized_crop", for
    photographs: at least 8 % of the area, aspect ratio 3:4 to 4:3, resized to model.image_size. none = neither."""

    @model_validator(mode="before")
    @classmethod
    def _one_of_three(cls, table: Any) -> Any:
        """Drop the default source if a mixture or a function replaces it."""
        replaced = isinstance(table, Mapping) and (table.get("mixture") or table.get("make") not in (None, NONE))
        if replaced and "source" not in table:
            return {**table, "source": None}
        return table

    @property
    def knows_text(self) -> bool:
        """Whether the tokenizer of the tokens is known: not for an .npz, nor for ids without a tokenizer."""
        if self.ids:
            return self.tokenizer != BYTES
        sources = [self.source, *(text.source for text in self.mixture.values())]
        return not any(word.endswith(ARRAYS) for source in sources for word in words_of(source))


BYTES, ARRAYS = "bytes", ".npz"


class EvalSet(Section):
    """[eval.NAME]: a further data set, evaluated in full beside the held-out side of [data]. Its metrics are
    eval_NAME_loss and so on."""

    source: Source
    """As data.source."""
    field: str | None = None
    """As data.field; none = the same."""


OF_TEXT = PERPLEXITY, BITS_PER_BYTE = "perplexity", "bits_per_byte"
ACCURACY = "accuracy"
_TOP = re.compile(r"top([1-9][0-9]{0,8})_accuracy")
_RULE = 'must be an array of "perplexity" and "bits_per_byte" for text, "top5_accuracy" (any number) for classes'


def _metrics(metrics: Any) -> Any:
    names = [metrics] if isinstance(metrics, str) else metrics
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UserError(_RULE)
    known = (*OF_TEXT, "top5_accuracy")
    for name in names:
        if name not in known and not _TOP.fullmatch(name):
            raise UserError(f"{_RULE}; it has {cut(repr(name))}{nearest(name, known)}")
    if len({*names}) < len(names):
        raise UserError("must name each metric once")
    return tuple(names)


EvalMetrics = Annotated[tuple[str, ...], PlainValidator(_metrics)]


def tops(metrics: Sequence[str]) -> dict[str, int]:
    """Return the k of each top-k accuracy among the metrics: name -> k."""
    return {name: int(match[1]) for name in metrics if (match := _TOP.fullmatch(name))}


_OWN_LOSS = OnlyFor("jdp's own losses, which are cross-entropies", lambda x: x.kind != "own" and not x.loss.make)


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
    """Initial parameters: the folder of a run (its newest checkpoint, not the average of ema_decay), a checkpoint, a
    .safetensors file or a folder with model.safetensors, under jdp's or Hugging Face's names. Missing LoRA
    parameters start fresh, missing tokens as the mean of the others. Paths as in data.source; none = random."""
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
    eval_metrics: Annotated[EvalMetrics, _OWN_LOSS] = ()
    """Metrics besides the loss. Text: "perplexity", "bits_per_byte" (of UTF-8). Classes: "top5_accuracy" (or another
    number): how often the label is among the five most likely."""
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


RuleName = Literal["adamw", "adam", "lion", "sgd", "muon"]


def _used_by(*names: RuleName) -> OnlyFor:
    """Mark a key that these update rules read."""
    return OnlyFor(", ".join(names), lambda x: x.optimizer.name in names, ", not {x.optimizer.name}")


class Optimizer(Made):
    """[optimizer]: the update rule and its learning rate over the run. Or `make`, a function of (schedule, keywords)
    that returns an optax.GradientTransformation; schedule is the learning rate by step."""

    _shared: ClassVar = ("lr", "warmup_steps", "schedule", "final_lr_fraction", "ema_decay", "clip_norm")
    _arguments: ClassVar[tuple[str, ...]] = ("schedule",)

    name: RuleName = "adamw"
    """The update rule. For others of optax: make = "optax:lamb", lr and its keywords, with --plugin optax."""
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
    weight_decay: Annotated[float, Field(ge=0), Single, _used_by("adamw", "lion", "sgd", "muon")] = 0.0
    """Weight decay; not applied to biases and norm scales. Decoupled from the gradient."""
    b1: Annotated[Decay, _used_by("adamw", "adam", "lion", "muon")] = 0.9
    """Decay of the first moment."""
    b2: Annotated[Decay, _used_by("adamw", "adam", "lion", "muon")] = 0.999
    """Decay of the second moment."""
    eps: Annotated[AboveZero, _used_by("adamw", "adam", "muon")] = 1e-8
    """Added to the denominator."""
    momentum: Annotated[Decay, _used_by("sgd")] = 0.0
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
