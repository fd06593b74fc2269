"""Model FLOPs of a step, and model FLOPs utilisation (MFU): the share of the devices' peak that a step uses.

The products and convolutions of the forward loss are counted in its jaxpr, also in loops. The backward pass costs twice
as much, one product for each operand's gradient; frozen parameters have none, so their share is subtracted.
Recomputation does not count. MFU = FLOPs of a step / (seconds × devices × peak FLOP/s of one), Chowdhery et al. 2022
(PaLM, arXiv:2204.02311), appendix B.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jdp.base.chips import GPUS
from jdp.core.gradients.loss_call import traced_dtype
from jdp.core.reading import count_flops
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.core.types import Batch


def model_flops(step: Step, state: TrainState, batch: Batch) -> float:
    """Return the FLOPs of one training step over the global batch, on all devices together."""
    adapter = state.static.adapter

    def loss(params: Any, model_state: Any, batch: Batch, rng: jax.Array) -> list[Any]:
        model = params if adapter is None else adapter.merge(params, model_state, rng)
        return jax.tree.leaves(step.loss_fn(model, batch, rng))

    shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, traced_dtype(leaf))  # noqa: E731
    others = jax.tree.map(shape, (state.model_state, batch, state.rng))
    working = step.settings.precision.working_shapes(state.params)
    forward = count_flops(jax.make_jaxpr(loss)(working, *others).jaxpr)
    if (trained := state.static.trained) is None:
        return 3.0 * forward
    sizes = [leaf.size for leaf in jax.tree.leaves(state.params)]
    share = sum(size for size, is_trained in zip(sizes, trained, strict=True) if is_trained) / sum(sizes)
    return (2 + share) * forward


# Whole names are compared: "NVIDIA H100 PCIe" and "NVIDIA H100 NVL" have other peaks than the "NVIDIA H100 80GB HBM3"
# in `GPUS`. The datasheet of the A100 has one column of peaks for all of its cards.
_LIKE_A100 = ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe")
# 10^12 bf16 FLOP/s (Google Cloud's pages of each TPU), also of a float32 product, which by default is one bf16 pass.
# A TPU has two names, depending on libtpu's version.
_TPUS = {"TPU v5 lite": 197, "TPU v5e": 197, "TPU v5": 459, "TPU v5p": 459, "TPU v6 lite": 918, "TPU v6e": 918}
_ELEMENT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Return the dense peak of one device's matrix units in FLOP/s; None if unknown."""
    if device_kind in _TPUS and dtype in ("bfloat16", "float32"):
        return 1e12 * _TPUS[device_kind]
    named = {chip.name: chip for chip in GPUS.values()} | dict.fromkeys(_LIKE_A100, GPUS["a100"])
    chip = named.get(device_kind)
    return None if chip is None else chip.matmul_flops.get(_ELEMENT.get(dtype, dtype))


def seconds_at_peak(step: Step, state: TrainState, batch: Batch) -> float | None:
    """Return the seconds of a training step at every device's peak: the MFU times the step's seconds."""
    devices = step.plan.mesh.devices
    peak = peak_flops(devices.flat[0].device_kind, jnp.dtype(step.settings.precision.compute_dtype).name)
    return None if peak is None else model_flops(step, state, batch) / (peak * devices.size)
