"""The tables [train] and [sample]: the course of a run, and what it writes at its end."""

from typing import Annotated, Literal

from pydantic import Field

from jdp.experiment.schema.fields import Batches, Best, Count, PathText, Patterns, Positive, Section, Single


class Train(Section):
    """[train]: what of the model, how long, how much at a time, how often."""

    steps: Positive
    """Optimizer steps in the whole run."""
    batch_size: Positive
    """Samples a step, over all devices and microbatches."""
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
    max_skips_in_a_row: Positive = 10
    """Stop after so many consecutive steps skipped because their gradients were not finite."""

    @property
    def best_metric(self) -> str | None:
        """What the best checkpoint is chosen by; None: none is kept."""
        return self.stop_metric if self.keep_best is True else self.keep_best or None


class Sample(Section):
    """[sample]: text written by the model at the end of the run; leave the table out for none."""

    prompt: Annotated[str, Field(min_length=1)] = "\n"
    """Text to continue."""
    length: Positive = 200
    """Tokens to add."""
    temperature: Annotated[float, Field(ge=0), Single] = 1.0
    """Divides the logits; 0 = always the likeliest."""
    top_k: Positive | None = None
    """Draw only from the k likeliest tokens; "none" = from all."""
