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

    The batch is a pytree of arrays that share their leading dimension, the rows (examples) of the global batch. They
    are NumPy arrays, or with several processes the global arrays that `jdp.shard_batches` makes.

    Args:
        loss_fn: `loss_fn(model, batch, rng)` -> `Loss`, sums over rows; or a scalar, which is the loss of all rows and
            takes `accumulate=1`. `model` is the NNX module in training mode if `init` returned one, else the
            parameters, in the compute dtype. `batch` is the whole batch or a part of its rows; `rng` is a key.
        plan: the mesh and the strategy.
        accumulate: number of microbatches per step, K. Raise it when the activations of a batch do not fit into memory.
            The rows of a batch must divide by K × the plan's batch shards.
        precision: "fp32"; "bf16" (bfloat16 compute and gathers, float32 master weights and reduction); or a
            `Precision`. "bf16" is usual on GPUs and TPUs.
        partitioning: "auto": the loss sees global arrays, and XLA places the collectives. "manual": it sees one
            device's rows under `jax.shard_map`, and jdp places them. None: "manual" for a `Loss`, "auto" for a scalar.
            Set it to compare the two. After the first trace `Step.partitioning` and `Step.why` report it.
        clip_norm: scale the gradient down to this global L2 norm if it is larger (Pascanu et al. 2013,
            arXiv:1211.5063). Usual for transformers and recurrent models, which have rare large gradients. None: no
            clipping. Then a gradient whose squared norm overflows float32 is skipped, because it would make second
            moments infinite for ever.
        wire: how gradients are encoded while they are sent, for slow links. None: as `precision` says. "bf16": 2 bytes
            an element. "int8": 1, and a scale for each block of 256. They are added up in float32.
            Rounding is drawn from the step's key, so it is right on average. Requires partitioning="manual".
        buckets: the bytes up to which XLA's compiler for GPUs joins collectives of one kind into one, in place of the
            limits that `compiler` sets. Give it, such as 25 * 2**20, for models of many small parameters, whose
            collectives take latency; joined ones start later. On CPUs it does nothing.
        check_loss: before a loss is called on parts of the batch ("manual", or K > 1), try on a few rows that it is a
            sum over rows. A loss that is none, or that cannot be tried, gets "auto" with K = 1, or an error. Give False
            when you know that it is a sum and the trial refuses it.
        donate: False keeps the old state, in memory of its own. Give it to compare states before and after a step, or
            to take several steps from one state. `jax_debug_nans` does so too: it runs a step whose result is not
            finite once more, operation by operation.
        compiler: options of XLA's compiler. "default" leaves its own. "overlap" hides more communication
            (`jdp.core.compiling.options.PRESETS`). "auto" is "overlap" on several GPUs without a model axis. Give
            option -> value when you know which option you need. They are resolved for the mesh's devices: options
            unknown to their compiler are left out and reported by name.

    Returns:
        A `Step`. Its metrics are global float32: `loss` (Σtotal / Σweight), `grad_norm` (the global L2 norm before
        clipping), `weight` (Σweight) and the loss function's own; and `skipped`, int32: skipped steps so far.

    Raises:
        ValueError: a setting is out of range. The step itself raises it for a batch whose rows do not divide, a donated
            state, and a loss that has to be a sum over rows and is none. With several processes it also raises it
            for a batch of this process alone, and if processes differ in shapes, plan, key or program.
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
        accumulate, precision, partitioning, check_loss, compiler: as for `make_train_step`, and needed when it
            needs them. Microbatches are computed one after another.

    Returns:
        A `Step`. Its metrics are global float32: `loss` (Σtotal / Σweight), `weight` (Σweight) and the loss function's
        own. To average over batches, weight each batch's metrics by its `weight`.

    Raises:
        ValueError: a setting is out of range. The step itself raises it for a batch whose rows do not divide, and for
            the faults of a loss and of several processes that `make_train_step` lists.
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
