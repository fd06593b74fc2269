"""`jdp.make_train_step` and `jdp.make_eval_step`: a loss, a plan and settings make a `Step`."""

from __future__ import annotations

from typing import Literal

from jdp.base.public import public
from jdp.base.words import Encoding, Partitioning, PrecisionName
from jdp.core.compiling.options import Compiler, CompilerOptions
from jdp.core.gradients.loss_call import check_loss_takes
from jdp.core.gradients.partitioned_loss import PartitionedLoss
from jdp.core.plan import Plan, check_plan
from jdp.core.precision import Precision
from jdp.core.step import Step
from jdp.core.step_settings import StepSettings
from jdp.core.types import LossFn


@public()
def make_train_step(
    loss_fn: LossFn,
    plan: Plan,
    *,
    accumulate: int = 1,
    precision: PrecisionName | Precision = "fp32",
    partitioning: Partitioning | None = None,
    clip_norm: float | None = None,
    wire: Encoding | None = None,
    buckets: int | None = None,
    check_loss: bool = True,
    donate: bool = True,
    compiler: CompilerOptions | Compiler = "auto",
) -> Step[Literal["train"]]:
    """Make `train_step(state, batch) -> (state, metrics)`. The state is donated: the new state takes its memory.

        >>> train_step = jdp.make_train_step(loss_fn, plan, accumulate=2, precision="bf16", clip_norm=1.0)
        >>> for _ in range(3):
        ...     state, metrics = train_step(state, batch)
        >>> int(state.step), sorted(metrics)
        (3, ['grad_norm', 'loss', 'skipped', 'weight'])

    The batch is a pytree of arrays with the same leading dimension: the rows (examples) of the global batch. With one
    process they may be NumPy arrays; with several they are global arrays, which `jdp.shard_batches` makes.

    Args:
        loss_fn: `loss_fn(model, batch, rng)` -> `Loss`, sums over rows; or a scalar, the loss of all rows, which
            requires `accumulate=1`. `model` is the NNX module in training mode if `init` returned one, else the
            parameters, in the compute dtype. `batch` is the whole batch or a part of its rows; `rng` is a key.
        plan: the mesh and the strategy.
        accumulate: number of microbatches per step, K. Raise it when the activations of a batch do not fit into memory.
            The rows of a batch must divide by K × the plan's batch shards.
        precision: "fp32"; "bf16" (bfloat16 compute and gathers, float32 master weights and reduction); or a
            `Precision`. "bf16" is usual on GPUs and TPUs.
        partitioning: "auto": the loss sees global arrays, and XLA inserts the collectives. "manual": it sees one
            device's rows under `jax.shard_map`, and jdp inserts them. None: "manual" for a `Loss`, "auto" for a scalar.
            Set it to compare the two. `Step.partitioning` and `Step.why` report it after the first trace.
        clip_norm: scale the gradient down to this global L2 norm if it is larger (Pascanu et al. 2013,
            arXiv:1211.5063). Usual for transformers and recurrent models, which have rare large gradients. None: no
            clipping; a step whose squared gradient norm overflows float32 is then skipped, because it would make second
            moments infinite.
        wire: how gradients are encoded while they are sent, for slow links. None: as `precision` says. "bf16": 2 bytes
            an element. "int8": 1 byte, and a scale for each block of 256. They are summed in float32. Rounding is
            random, drawn from the step's key, so it is unbiased. Requires partitioning="manual".
        buckets: XLA's compiler for GPUs combines collectives of the same kind up to this number of bytes, instead of
            the limits that `compiler` sets. Give it, such as 25 * 2**20, for models of many small parameters, whose
            collectives are limited by latency; combined collectives start later. It does nothing on CPUs.
        check_loss: before a loss is called on parts of the batch ("manual", or K > 1), check on a few rows that it is a
            sum over rows. If it is not, or if this cannot be checked, the step uses "auto" with K = 1, or raises an
            error. Give False if you know that it is a sum and the check refuses it.
        donate: False keeps the old state in memory. Use it to compare states before and after a step, or to take
            several steps from one state. `jax_debug_nans` does so too: it repeats a step whose result is not finite,
            operation by operation.
        compiler: options of XLA's compiler. "default": XLA's defaults. "overlap": hides more communication
            (`jdp.core.compiling.options.PRESETS`). "auto": "overlap" on several GPUs without a model axis, else
            "default". Or a dictionary from options to values. Options that the compiler of the mesh's devices does not
            know are left out and reported by name.

    Returns:
        A `Step`. Its metrics are global float32: `loss` (Σtotal / Σweight), `grad_norm` (the global L2 norm before
        clipping), `weight` (Σweight) and the metrics of the loss function. The number of steps skipped so far is
        `skipped`, int32.

    Raises:
        ValueError: a setting is out of range. The step itself raises it if a batch's rows do not divide, if the state
            was donated, and if the loss must be a sum over rows but is not. With several processes it also raises it
            if the batch's arrays are not global, and if processes differ in shapes, plan, key or program.
    """
    check_plan(plan, "jdp.make_train_step(loss_fn, plan)", loss_fn)
    check_loss_takes(loss_fn, 3)
    settings = StepSettings(
        precision=Precision.of(precision),
        requested=partitioning,
        accumulate=accumulate,
        clip_norm=clip_norm,
        wire=wire,
        check_loss=check_loss,
        donate=donate,
        compiler=Compiler.of(compiler, buckets),
    )
    return Step(PartitionedLoss(loss_fn, plan, settings, "train step"))


@public()
def make_eval_step(
    loss_fn: LossFn,
    plan: Plan,
    *,
    accumulate: int = 1,
    precision: PrecisionName | Precision = "fp32",
    partitioning: Partitioning | None = None,
    check_loss: bool = True,
    compiler: CompilerOptions | Compiler = "auto",
) -> Step[Literal["eval"]]:
    """Make `eval_step(state, batch) -> metrics`: forward only, without gradients; the state is not donated.

        >>> eval_step = jdp.make_eval_step(loss_fn, plan)
        >>> metrics = eval_step(state, batch)
        >>> sorted(metrics), float(metrics["weight"])
        (['loss', 'weight'], 16.0)

    Args:
        loss_fn: `loss_fn(model, batch, rng)` -> `Loss`, or a scalar, the mean over the batch's rows. `rng` is None, and
            an NNX module is in evaluation mode.
        plan: the mesh and the strategy.
        accumulate, precision, partitioning, check_loss, compiler: as for `make_train_step`. Give both steps the same
            values. Microbatches are computed one after another.

    Returns:
        A `Step`. Its metrics are global float32: `loss` (Σtotal / Σweight), `weight` (Σweight) and the metrics of the
        loss function. To average over batches, weight each batch's metrics by its `weight`.

    Raises:
        ValueError: a setting is out of range. The step itself raises it for the causes that `make_train_step` lists.
    """
    check_plan(plan, "jdp.make_eval_step(loss_fn, plan)", loss_fn)
    check_loss_takes(loss_fn, 3)
    settings = StepSettings(
        precision=Precision.of(precision),
        requested=partitioning,
        accumulate=accumulate,
        train=False,
        check_loss=check_loss,
        compiler=Compiler.of(compiler),
    )
    return Step(PartitionedLoss(loss_fn, plan, settings, "eval step"))
