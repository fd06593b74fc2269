"""The tables [train], [sample] and [guard]: the course of a run, its outputs, and its checks."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from jdp.experiment.schema.evaluate import EvalMetrics
from jdp.experiment.schema.fields import (
    Address,
    Batches,
    Best,
    Count,
    PathText,
    Patterns,
    Positive,
    Prompts,
    Section,
)
from jdp.experiment.schema.model import Model
from jdp.models.configs.gpt import GPTConfig


class Train(Section):
    """[train]: which parameters, how long, how much at a time, how often."""

    steps: Positive
    """Optimizer steps in the whole run."""
    batch_size: Positive
    """Samples a step, over all devices and microbatches. A resumed run may have another: samples, steps and the
    learning rate go on where they were."""
    accumulate: Positive = 1
    """Microbatches a step."""
    wrt: Patterns = None
    """Which parameters are trained: a path pattern such as "*/lora_*" (`*` matches slashes too), or an array of them;
    the others are frozen, without gradients and optimizer state. none = all."""
    init_from: PathText | None = None
    """Where the parameters start: the folder of a run (its newest checkpoint), a checkpoint, a .safetensors file or a
    folder with model.safetensors, under jdp's names or Hugging Face's. LoRA parameters that it lacks start fresh,
    and tokens as the mean of its own. Relative as data.source; none = random."""
    log_every: Positive = 10
    """Steps between lines of metrics."""
    wandb: Annotated[str, Field(min_length=1)] | None = None
    """Weights & Biases project, or ENTITY/PROJECT, beside the run's metrics.jsonl and TensorBoard events;
    WANDB_MODE=offline keeps it in the run's folder."""
    eval_every: Count = 0
    """Steps between evaluations; 0 = only at the end."""
    eval_batches: Batches = 10
    """Most batches an evaluation reads of each data set, always the same, drawn from all of it; "all" = every example
    once."""
    eval_metrics: EvalMetrics = ()
    """More metrics than the loss. Text: "perplexity", "bits_per_byte" (of UTF-8), and "accuracy" of the next token.
    Text and classes: "top5_accuracy", or another number: how often the label is among the five likeliest."""
    stop_after: Count = 0
    """Stop early after this number of evaluations in a row without a better eval_loss, or metric of keep_best; 0 =
    never."""
    checkpoint_every: Count = 0
    """Steps between checkpoints; 0 = only at the end."""
    mirror: Address | None = None
    """Where committed checkpoints are copied in the background: s3://bucket/run, gs://bucket/run, or another storage
    that fsspec has. A start whose newest checkpoint is older fetches the mirror's; none = no mirror."""
    keep_checkpoints: Positive = 3
    """How many of the newest checkpoints stay."""
    keep_best: Best = False
    """Keep the checkpoint of the best evaluation as well: true (by eval_loss), or the metric to go by. An accuracy
    grows, any other metric falls."""
    export: Literal["hf"] | None = None
    """"hf" writes the model to the run's folder export/ at the end of training, as Hugging Face's libraries read it:
    the best checkpoint with keep_best, else the last; averaged weights if there are, LoRA's updates added. none = no
    export."""
    export_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Type of the weights in the export; none = that of the model of Hugging Face's that they began as, else fp32."""
    max_skips_in_a_row: Positive = 10
    """Stop after so many consecutive steps skipped because gradients or updates were not finite."""

    @property
    def best_metric(self) -> str:
        """The metric that the best checkpoint and early stopping go by."""
        return self.keep_best if isinstance(self.keep_best, str) else "eval_loss"

    def export_problems(self, model: Model) -> Iterator[str]:
        """Yield why the model cannot be exported."""
        if self.export is None:
            if self.export_dtype is not None:
                yield f"train.export_dtype is for train.export; given {self.export_dtype!r}: add that, or remove it"
            return
        if not isinstance(config := model.config, GPTConfig):
            yield f"train.export is for a GPT, and {model.chosen} is none: remove the key"
            return
        from jdp.checkpoint.safetensors.hugging_face_config import check_written  # late: Orbax takes a second

        try:
            check_written(config)
        except ValueError as error:
            yield f'train.export = "hf" is for models of transformers, and this is none: remove the key. {error}'


class Sample(Section):
    """[sample]: text written by the model during the run and at its end, into samples/; leave the table out for none.
    The draws are those of the seed, so `jdp generate RUN --step N` writes the text of step N."""

    prompt: Prompts = "\n"
    """Text to continue, or an array of texts."""
    every: Count = 0
    """Steps between samples; 0 = only at the end."""
    length: Positive = 200
    """Tokens to add."""

    @property
    def prompts(self) -> tuple[str, ...]:
        """The texts to continue."""
        return (self.prompt,) if isinstance(self.prompt, str) else self.prompt


class Guard(Section):
    """[guard]: what watches over a run. It may differ between the visits of a run."""

    deadline_seconds: Count = 300
    """Seconds within which a step must end, or ten times the median step if that is longer; else all processes say
    where they are, and exit with code 75 (run again); 0 = no deadline. The first step and the first batch of an
    evaluation, which compile, a restore and a save have twelve times as long."""
    keep_in_memory: Count = 0
    """Steps between copies of the state in the hosts' memory (/dev/shm, or $JDP_MEMORY_DIR), each part on two hosts. A
    restart goes on from them, also on fewer hosts; 0 = none."""
    check_replicas_every: Count = 100
    """Steps between comparisons, bit for bit, of what several devices should hold alike; also made before each
    checkpoint, so that none holds a wrong copy. A device that differs ends the run with exit code 78 and its host's
    name. 0 = never."""

    @property
    def first_deadline_seconds(self) -> int:
        """The deadline of what happens once: a compilation, a restore, a save."""
        return 12 * self.deadline_seconds
