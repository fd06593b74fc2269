"""Model FLOPs utilisation (MFU): the share of the devices' published peak that a step's mathematics makes use of.

MFU = FLOPs of a step / (seconds × devices × peak FLOP/s of one), Chowdhery et al. 2022 (PaLM, arXiv:2204.02311),
appendix B. The FLOPs are those of the model (`model_flops.py`): work done again, by rematerialisation or for
padding that the compiler adds, earns nothing. Where the peak is not known there is no MFU.
"""

from __future__ import annotations

import jax.numpy as jnp

from jdp.base.chips import CHIPS
from jdp.core.state import TrainState
from jdp.core.step import Step
from jdp.core.types import Batch
from jdp.foresight.timing.model_flops import model_flops

# How a device is matched to a chip: by its whole `device_kind`. Part of a name would not do: "NVIDIA H100 PCIe" and
# "NVIDIA H100 NVL" have other peaks than the "NVIDIA H100 80GB HBM3" that `CHIPS` describes. The kinds below are those
# with the same matrix units at the same rate: the A100 datasheet has one column of peaks for all four cards, and TPUs
# go by two names, depending on libtpu's version.
_SAME_PEAK = {
    "NVIDIA A100-SXM4-40GB": "a100",
    "NVIDIA A100-PCIE-40GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100",
    "TPU v5e": "tpu-v5e",
    "TPU v5p": "tpu-v5p",
    "TPU v6e": "tpu-v6e",
}
_ELEMENT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Return the dense peak of one device's matrix units in FLOP/s; None where it is not known."""
    named = {chip.name: chip for chip in CHIPS.values()} | {kind: CHIPS[name] for kind, name in _SAME_PEAK.items()}
    chip = named.get(device_kind)
    return None if chip is None else chip.matmul_flops.get(_ELEMENT.get(dtype, dtype))


def seconds_at_peak(step: Step, state: TrainState, batch: Batch) -> float | None:
    """Return the seconds of a training step at every device's peak; divided by its time, that is the MFU."""
    devices = step.plan.mesh.devices
    peak = peak_flops(devices.flat[0].device_kind, jnp.dtype(step.precision.compute_dtype).name)
    if peak is None:
        return None
    return model_flops(step, state, batch) / (peak * devices.size)
