"""Every test sees eight virtual CPU devices, whatever the machine has, and no GPU plugin is asked to start."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("XLA_FLAGS", None)

import jax

jax.config.update("jax_num_cpu_devices", 8)
