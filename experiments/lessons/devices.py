"""Eight devices for every lesson: real ones if there are two or more, else virtual ones on the CPU."""

import contextlib
import os

import jax

from jdp.base.machine import use_cpu_devices, visible_gpus


def use_eight_devices() -> None:
    """Have JAX start eight virtual CPU devices, unless the machine has two or more GPUs.

    Call it before the first array is made: JAX starts its devices then, and they cannot change afterwards. If they have
    started already, as in tests, nothing changes. An explicit JAX_PLATFORMS is respected.
    """
    with contextlib.suppress(RuntimeError):  # JAX raises it if its devices have started
        use_cpu_devices(8)
        if "JAX_PLATFORMS" not in os.environ and len(visible_gpus(os.environ)) < 2:
            jax.config.update("jax_platforms", "cpu")
