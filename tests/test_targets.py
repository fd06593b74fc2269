"""Targets: devices this machine does not have, good enough for XLA's compiler; and what is said when that cannot be."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.foresight import targets
from jdp.foresight.targets import target

GIB = 2**30
ROOT = Path(__file__).parent.parent


def python(code: str, **environ: str | None) -> subprocess.CompletedProcess[str]:
    """`code` in a process of its own, where jax has not started, with environment variables set or (None) removed."""
    env = {k: v for k, v in (os.environ | environ).items() if v is not None}
    return subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, timeout=100)


def compiled(devices, f, shape=(64, 128), dtype=jnp.float32) -> str:
    mesh = Mesh(np.array(devices), ("data",))
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("data")))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P())).lower(x).compile().as_text()


# What a target is


def test_devices_are_ordered_host_by_host():
    found = target("h100:3x4")
    assert (found.kind, found.hosts, found.per_host, str(found)) == ("h100", 3, 4, "h100:3x4")
    assert [d.process_index for d in found.devices] == [0] * 4 + [1] * 4 + [2] * 4
    assert [d.id for d in found.devices] == list(range(12))


def test_thousands_of_devices():
    found = target("h100:512x8")
    assert len(found.devices) == 4096
    assert found.devices[-1].process_index == 511


@pytest.mark.parametrize(
    ("kind", "description", "gib"),
    [
        ("a100", "NVIDIA A100-SXM4-80GB", 79.26),
        ("h100", "NVIDIA H100 80GB HBM3", 79.11),
        ("h200", "NVIDIA H200", 139.80),
        ("b200", "NVIDIA B200", 178.36),
    ],
)
def test_every_gpu_kind_compiles_matrix_products_and_collectives(kind, description, gib):
    found = target(f"{kind}:1x8")
    assert found.description == description == found.devices[0].device_kind
    assert found.memory_bytes is not None
    assert round(found.memory_bytes / GIB, 2) == gib
    text = compiled(found.devices, lambda x: jax.lax.psum(x @ x.T, "data"), shape=(1024, 128), dtype=jnp.bfloat16)
    assert "is_scheduled=true" in text
    assert "num_partitions=8" in text
    assert "all-reduce" in text


def test_hosts_are_separate_nvlink_domains():
    """Inside a host XLA may reduce small tensors by writing into peers' memory; between hosts it cannot."""

    def kernel(name: str) -> bool:
        text = compiled(target(name).devices, lambda x: jax.lax.psum(x, "data"))
        return "TRITON_ONE_SHOT" in text

    assert kernel("h100:1x8")
    assert not kernel("h100:2x8")


def test_cpu_is_the_virtual_devices_of_this_process():
    found = target("cpu:4")
    assert found.devices == tuple(jax.devices("cpu")[:4])
    assert (found.kind, found.hosts, found.per_host, found.memory_bytes, str(found)) == ("cpu", 1, 4, None, "cpu:4")


# What is said when a name does not do


@pytest.mark.parametrize("name", ["", "h100", "h100:8", "h100:8x", "h100:0x8", "h100:8x8x8", "cpu:0", "cpu:1x8", "cpu"])
def test_bad_grammar_shows_the_grammar_and_what_was_given(name):
    with pytest.raises(ValueError, match=r"KIND:HOSTSxPER_HOST.*h100:8x8.*cpu:8") as error:
        target(name)
    assert repr(name) in str(error.value)


@pytest.mark.parametrize(("name", "nearest"), [("h10:8x8", "h100"), ("H200:1x8", "h200"), ("a100-80gb:1x8", "a100")])
def test_an_unknown_kind_names_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=rf"unknown device kind .* did you mean '{nearest}'\? Known are a100, h100"):
        target(name)


def test_an_unknown_kind_like_none_gets_the_list_only():
    with pytest.raises(ValueError, match=r"'mi300x:1x8': Known are a100, h100, h200, b200, cpu$"):
        target("mi300x:1x8")


def test_too_few_cpu_devices_says_how_many_and_how_to_make_them():
    with pytest.raises(ValueError, match=r"needs 99 CPU devices and this process has 8: .*JAX_NUM_CPU_DEVICES=99"):
        target("cpu:99")


def test_the_advice_for_cpu_devices_works():
    code = "from jdp.foresight.targets import target; print(len(target('cpu:3').devices))"
    assert python(code, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="3").stdout.strip() == "3"


# What is said when the compiler is missing or wrong


def packages(monkeypatch, **versions: str | None) -> None:
    """Pretend these packages have these versions, or (None) are not installed."""
    real = importlib.metadata.version
    given = {name.replace("_", "-"): version for name, version in versions.items()}

    def version(name: str) -> str:
        if name in given and given[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return given.get(name) or real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_a_missing_compiler_is_one_command_away(monkeypatch):
    packages(monkeypatch, jax_cuda13_pjrt=None)
    with pytest.raises(ValueError, match=r"GPU compiler, which is not installed: pip install 'jdp\[aot\]'$"):
        target("h100:1x8")


def test_a_compiler_of_another_version_names_both(monkeypatch):
    jaxlib = importlib.metadata.version("jaxlib")
    packages(monkeypatch, jax_cuda13_pjrt="0.9.9")
    with pytest.raises(ValueError, match=r"jax-cuda13-pjrt is 0\.9\.9, jaxlib is") as error:
        target("h100:1x8")
    assert f"pip install 'jax-cuda13-plugin=={jaxlib}' 'jax-cuda13-pjrt=={jaxlib}'" in str(error.value)


def test_missing_device_libraries_are_found_out_before_compiling(monkeypatch):
    packages(monkeypatch, nvidia_nvvm=None)
    monkeypatch.delenv("CUDA_ROOT", raising=False)
    monkeypatch.setattr(Path, "exists", lambda self: False)  # no CUDA toolkit on the machine either
    with pytest.raises(ValueError, match=r"ptxas and libdevice .*: pip install 'jdp\[aot\]'"):
        target("h100:1x8")
    monkeypatch.setenv("CUDA_ROOT", "/opt/cuda")
    assert len(target("h100:1x8").devices) == 8


# What it does to the process


def test_importing_the_module_starts_nothing():
    code = """
import sys, jdp.foresight.targets
from jax._src import xla_bridge
assert not xla_bridge._backends
assert not [m for m in sys.modules if m.startswith("jax_plugins.")]
"""
    assert python(code).returncode == 0


needs_no_driver = pytest.mark.skipif(targets._has_driver(), reason="about machines without an NVIDIA driver")


@needs_no_driver
def test_without_jax_platforms_a_target_works_and_nothing_is_left_changed():
    code = """
import os, jax
from jdp.foresight.targets import target
before = dict(os.environ)
print(len(target("h100:1x8").devices))
assert os.environ == before
assert jax.default_backend() == "cpu"
"""
    done = python(code, JAX_PLATFORMS=None)
    assert (done.stdout.strip(), done.returncode) == ("8", 0), done.stderr


@needs_no_driver
def test_a_plugin_that_failed_earlier_in_the_process_is_explained():
    code = """
import jax
from jdp.foresight.targets import target
jax.devices()
try:
    target("h100:1x8")
except ValueError as error:
    print(error)
"""
    assert "Start the process with JAX_PLATFORMS=cpu" in python(code, JAX_PLATFORMS=None).stdout
