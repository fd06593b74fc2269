"""What jax asks the GPU and the cuDNN at hand before it traces fused attention, answered for GPUs that are described.

jax looks at this machine (`jax._src.cudnn.fused_attention_stablehlo`), which need not have either. XLA's compiler does
not need cuDNN: the program holds calls of `__cudnn$fmha...`, which are resolved where it runs.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager

from jax._src.cudnn import fused_attention_stablehlo as attention

from jdp.core.types import Device
from jdp.foresight.targets.gpu_config import fields

ASSUMED = 91_000
"""cuDNN 9.10, as `gpu_config.written` has it, for a description that names none."""
_LOCK = threading.RLock()


def version_in(config: str) -> int:
    """Return the version of cuDNN that a GPU's description names, as cuDNN itself counts: 91000 is 9.10.0."""
    scalars = fields(config)
    major, minor, patch = (int(scalars.get(f"dnn_version_info.{part}", "0")) for part in ("major", "minor", "patch"))
    return 10_000 * major + 100 * minor + patch or ASSUMED


@contextmanager
def answered_for(device: Device, version: int) -> Generator[None]:
    """Answer jax's questions for a described GPU while the context lasts, in which a program for it is traced."""
    if device.platform != "gpu":
        yield
        return
    capability = _parts(device.compute_capability)
    answers = {
        "check_cudnn_version": lambda: version,
        "check_compute_capability": lambda least: capability >= _parts(least),
        "is_cuda_compute_capability_equal": lambda other: capability == _parts(other),
    }
    with _LOCK:
        asked = {name: getattr(attention, name) for name in answers if hasattr(attention, name)}
        for name in asked:
            setattr(attention, name, answers[name])
        try:
            yield
        finally:
            for name, function in asked.items():
                setattr(attention, name, function)


def _parts(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))
