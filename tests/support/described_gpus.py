"""GPUs that are not there: steps and attention compiled for them, and jdp's descriptions against XLA's."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdp
from jdp.base.chips import GPUS
from jdp.experiment.losses import text_loss
from jdp.foresight.program.module import parse
from jdp.foresight.targets.descriptions import written
from jdp.foresight.targets.relocate import abstract_on
from jdp.foresight.targets.resolve import target
from jdp.foresight.verify import report
from jdp.models import build

WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False, "xla_disable_hlo_passes": "triton-softmax-rewriter"}
"""XLA's options that compile for described GPUs in half the time: products by cuBLAS, softmaxes by plain kernels.

What a step sends does not depend on it. Tests of what it holds, and of its time, say which of their programs have them.
"""


def compiled_step(name, config, plan, *columns, partitioning=None):
    """Compile a step of 16 rows for the target of this name; return the program, and whether it keeps the contract."""
    state = jdp.abstract_state(
        lambda rng: build(config, rngs=nnx.Rngs(rng)), optax.sgd(1e-3), plan, rng=jax.random.key(0)
    )
    step = jdp.make_train_step(
        text_loss, plan, precision="bf16", partitioning=partitioning, compiler=WITHOUT_TRITON, check_loss=False
    )
    batch = {column: np.zeros((16, config.context), np.int32) for column in ("tokens", "targets", "weights", *columns)}
    devices = target(name)
    candidate = abstract_on(step, state, batch, devices)
    compiled = candidate.compile(devices)
    return compiled, report(candidate.step, candidate.state, compiled, name)


def program_of(function, *shapes, dtype="bfloat16"):
    """The program of `function` on arrays of these shapes, compiled for one H100."""
    device = jax.sharding.SingleDeviceSharding(target("h100:1x1").devices[0])
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=device) for shape in shapes]
    return parse(jax.jit(function).lower(*arguments).compile().as_text())


def assert_alike(forms, length, dtype, bound):
    """Two forms of attention have the same result and gradients, of drawn queries, keys and values; return these."""
    rng = np.random.default_rng(0)
    *operands, cotangent = (jnp.asarray(rng.normal(size=(2, length, heads, 8)), dtype) for heads in (4, 2, 2, 4))

    @functools.partial(jax.jit, static_argnums=0)
    def run(form, cotangent, *operands):
        mixed, pull = jax.vjp(form, *operands)
        return mixed, *pull(cotangent)

    ours, theirs = (run(form, cotangent, *operands) for form in forms)
    assert [x.dtype for x in ours] == [dtype] * 4
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.float32(mine), np.float32(other), atol=bound, rtol=bound)
    return operands


_TOKEN = re.compile(r'\s*(?:#[^\n]*|([A-Za-z_]\w*)\s*:?\s*\{|([A-Za-z_]\w*)\s*:\s*("(?:[^"\\]|\\.)*"|[^\s{}]+)|(\}))')
# Fields of the installation, not of the device, or repetitions of other fields.
_SOFTWARE = ("dnn_version", "driver_version", "runtime_version", "compile_time_toolkit_version", "name")


def device_fields(text: str) -> dict[str, str]:
    """Return the fields of the device without zeros, which XLA does not write; `name` is jax's name for the device."""
    prefix, path, scalars = "gpu_device_info.", list[str](), dict[str, str]()
    for opened, name, value, closed in _TOKEN.findall(text):
        if opened:
            path.append(opened)
        elif name:
            scalars[".".join((*path, name))] = value.strip('"')
        elif closed:
            path = path[:-1]
    device = {k.removeprefix(prefix): v for k, v in scalars.items() if k.startswith(prefix) and v not in ("0", "NONE")}
    name = scalars.get("device_description_str") or device.get("name", "")
    return {k: v for k, v in device.items() if k not in _SOFTWARE} | {"name": name}


def differences(kind: str, dumped: str) -> list[str]:
    """A line for each field that our description of a GPU states and that the device of a dump has otherwise.

    Newer XLAs dump more of a device (rates of its units, its PCIe, ECC), which is not compared; nor are versions.
    """
    device = device_fields(dumped)
    return [
        f"{name}: shipped {value}, device {device.get(name, 'nothing')}"
        for name, value in device_fields(written(GPUS[kind])).items()
        if device.get(name) != value
        and not (name == "clock_rate_ghz" and float(device[name]) == pytest.approx(float(value)))
    ]
