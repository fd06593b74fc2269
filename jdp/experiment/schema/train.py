"""The tables [train], [sample], [track] and [guard]: the course of a run, its outputs, and its checks."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from jdp.base.by_step import ByStep
from jdp.experiment.schema.by_step import Sizes
from jdp.experiment.schema.fields import (
    Batches,
    Best,
    Count,
    PathText,
    Patterns,
    Positive,
    Prompts,
    Section,
    Single,
    Whole,
)
from jdp.experiment.schema.model import Model
from jdp.models.configs.gpt import GPTConfig


class Train(Section):
    """[train]: which parameters, how long, how much at a time, how often."""

    steps: Positive
    """Optimizer steps in the whole run."""
    batch_size: Sizes
    """Samples a step, over all devices and microbatches. [[0, 64], [1000, 128]]: 64, and 128 after 1000 steps;
    optimizer.lr_scaling says whether the rate follows."""
    accumulate: Positive = 1
    """Microbatches a step."""
    noise_scale: bool = False
    """Measure the gradient noise scale: the batch size up to which more samples a step pay (metric noise_scale, in
    samples; of text in tokens)."""
    wrt: Patterns = None
    """Which parameters are trained: a path pattern such as "*/lora_*" (`*` matches slashes too), or an array of them;
    the others are frozen, without gradients and optimizer state. none = all."""
    init_from: PathText | None = None
    """Where the parameters start: the folder of a run (its newest checkpoint), a checkpoint, a .safetensors file or a
    folder with model.safetensors; or an address of these. LoRA parameters that it lacks start fresh. Relative as
    data.source; none = random."""
    init_names: Literal["jdp", "hf", "gpt2", "llama"] = "jdp"
    """Names that tensors have in that safetensors file: jdp's paths, or "hf", those of Hugging Face for this model
    ("gpt2" or "llama": of this layout; the second is that of Mistral, Qwen2, Qwen3 and Gemma too)."""
    init_adapter: PathText | None = None
    """The folder of a LoRA adapter in PEFT's format, or its address, read after init_from; model.lora_rank, lora_alpha
    and lora_targets are the adapter's. Relative as data.source; none = no adapter."""
    log_every: Positive = 10
    """Steps between lines of metrics."""
    eval_every: Count = 0
    """Steps between evaluations; 0 = only at the end."""
    eval_batches: Batches = 10
    """Most batches an evaluation reads of each data set, always the same, drawn from all of it; "all" = every example
    once."""
    stop_after: Count = 0
    """Stop early after so many evaluations in a row without improvement; 0 = never."""
    stop_metric: Annotated[str, Field(min_length=1)] = "eval_loss"
    """What must improve: a metric of the evaluations. An accuracy grows, any other falls."""
    min_delta: Annotated[float, Field(ge=0), Single] = 0.0
    """How much better counts as an improvement, for stop_after."""
    checkpoint_every: Count = 0
    """Steps between checkpoints; 0 = only at the end."""
    keep_checkpoints: Positive = 3
    """How many of the newest checkpoints stay."""
    keep_every: Positive | None = None
    """Checkpoints of steps that this divides stay too; none = no others."""
    keep_best: Best = False
    """Keep the checkpoint of the best evaluation as well: true (by stop_metric), or the metric to go by."""
    export: Literal["hf"] | None = None
    """"hf" writes the model to the run's folder export/ at the end of training, as Hugging Face's libraries read it:
    the best checkpoint with keep_best, else the last; averaged weights if there are, LoRA's updates added. none = no
    export."""
    max_skips_in_a_row: Positive = 10
    """Stop after so many consecutive steps skipped because gradients or updates were not finite."""

    @property
    def sizes(self) -> ByStep[int]:
        """The batch size by step."""
        return ByStep[int].of(self.batch_size)

    @property
    def best_metric(self) -> str | None:
        """The metric that chooses the best checkpoint; None: none is kept."""
        return self.stop_metric if self.keep_best is True else self.keep_best or None

    def export_problems(self, model: Model) -> Iterator[str]:
        """Yield why the model cannot be exported."""
        if self.export is None:
            return
        if not isinstance(config := model.config, GPTConfig):
            yield f"train.export is for a GPT, and model.name = {model.name!r} is none: remove the key"
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
    temperature: Annotated[float, Field(ge=0), Single] = 1.0
    """Divides the logits; 0 = always the likeliest."""
    top_k: Positive | None = None
    """Draw only from the k likeliest tokens; "none" = from all."""

    @property
    def prompts(self) -> tuple[str, ...]:
        """The texts to continue."""
        return (self.prompt,) if isinstance(self.prompt, str) else self.prompt


Name = Annotated[str, Field(min_length=1)]


class Track(Section):
    """[track]: where metrics go besides the run's folder, which always has metrics.jsonl and TensorBoard events."""

    wandb: Name | None = None
    """Weights & Biases project, or ENTITY/PROJECT; WANDB_MODE=offline keeps it in the run's folder."""
    mlflow: Name | None = None
    """MLflow experiment; MLFLOW_TRACKING_URI names its server."""


class Guard(Section):
    """[guard]: what watches over a run. It may differ between the visits of a run."""

    deadline_seconds: Count = 300
    """Seconds within which a step must end, or ten times the median step if that is longer; else all processes say
    where they are, and exit with code 75 (run again); 0 = no deadline."""
    first_deadline_seconds: Count = 3600
    """The same for what happens once: the first step and the first batch of an evaluation, which compile, a restore
    and a save; 0 = no deadline."""
    keep_in_memory: Count = 0
    """Steps between copies of the state in the hosts' memory (/dev/shm, or $JDP_MEMORY_DIR), each part on two hosts. A
    restart goes on from them, also on fewer hosts; 0 = none."""
    check_replicas_every: Count = 100
    """Steps between comparisons, bit for bit, of what several devices should hold alike; also made before each
    checkpoint. For a device that differs the run goes back to the checkpoint before; at its second time it ends with
    exit code 78, and with 70 where no majority says which device is wrong. 0 = never."""
    replay_every: Count = 0
    """Steps between those that are taken twice, and must give equal bits; it takes memory for another state,
    and on GPUs --xla_gpu_deterministic_ops=true in XLA_FLAGS. 0 = never."""
    inspect_bad_steps: bool = True
    """After a step without a finite gradient: compute it once more, say where it broke, and keep the batch in the run's
    folder flight/; for three at most, until the run is resumed or goes back. It compiles another program."""
    spike_deviations: Annotated[float, Field(ge=0), Single] = 0.0
    """A loss so many standard deviations above its running mean is a spike, and its step a bad one; OLMo 2 counts from
    7 on. 0 = none is."""
    spike_window: Annotated[int, Field(ge=2), Whole] = 1000
    """Steps that the running mean reaches back."""
    roll_back_after: Annotated[int, Field(ge=0, le=50)] = 0
    """After so many bad steps in a row (no finite gradient, or a spike) go back to the checkpoint before them, and
    leave their batches out; 0 = never."""
    leave_out_before: Count = 1
    """How many steps before the first bad one are left out too: one of them may have spoilt the weights."""
    check_hosts_every: Count = 20
    """Steps between comparisons of how late each process' host is; one that costs more than 5 % of a step is named.
    0 = never."""
