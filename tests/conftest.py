"""Every test sees eight virtual CPU devices, whatever the machine has, and no GPU plugin is asked to start."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Half the compile time; what XLA's own passes do - partitioning, fusion, scheduling - stays as it is.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

import jax

jax.config.update("jax_num_cpu_devices", 8)
