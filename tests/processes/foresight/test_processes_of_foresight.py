"""What `jdp.foresight` does in processes of its own."""

import pytest
from own_process import python

from jdp.foresight.targets import resolve as targets

TPU_CODE = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jdp.foresight.timing.timeline import collective_cost
from jdp.foresight.targets.resolve import target
found = target("tpu-v5e:2x2")
mesh = Mesh(np.array(found.devices), ("data",))
x = jax.ShapeDtypeStruct((1024, 128), jnp.float32, sharding=NamedSharding(mesh, P("data")))
f = jax.shard_map(lambda x: jax.lax.psum(x @ x.T, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
print("all-reduce" in jax.jit(f).lower(x).compile().as_text())
cost = collective_cost("all-reduce", 2**30, ((0, 1, 2, 3),), found)
print(cost.algorithm, round(cost.wire_seconds * 1e3, 3), round(cost.latency_seconds * 1e6, 3))
"""


@pytest.mark.skipif(targets._installed("libtpu") is None, reason="TPU targets need libtpu")
def test_tpus_compile_where_libtpu_is():
    lines = python("-c", TPU_CODE).stdout.splitlines()
    # 2 · 3/4 GiB over the 200 GB/s that leave a v5e chip; 2 rounds of one hop along each of two axes, 1 us each.
    assert lines == ["True", "torus 8.053 4.0"]


needs_no_driver = pytest.mark.skipif(targets._has_driver(), reason="about machines without an NVIDIA driver")


@needs_no_driver
@pytest.mark.parametrize("first", ["pass", "jax.devices()"], ids=["alone", "after the plugin failed"])
def test_without_jax_platforms_a_target_works(first, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    code = f"""
import os, jax
from jdp.foresight.targets.resolve import target
{first}
before = dict(os.environ)
try:
    print(len(target("h100:1x8").devices))
except ValueError as error:
    print(error)
assert os.environ == before and jax.default_backend() == "cpu"
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    expected = "8" if first == "pass" else "Start the process with JAX_PLATFORMS=cpu"
    assert expected in done.stdout
