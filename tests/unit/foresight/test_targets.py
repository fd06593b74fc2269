"""Targets: devices this machine does not have, good enough for XLA's compiler; and the errors when that cannot be."""

import importlib.metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from described_gpus import differences
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.base.chips import GPUS
from jdp.foresight.targets.resolve import Target, target

GIB = 2**30


def compiled(devices, f, shape=(64, 128), dtype=jnp.float32, **options) -> str:
    mesh = Mesh(np.array(devices), ("data",))
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("data")))
    lowered = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P())).lower(x)
    return lowered.compile(compiler_options=options).as_text()


@pytest.mark.aot
def test_devices_are_ordered_host_by_host():
    found = target("h100:3x4")
    assert (found.kind, found.hosts, found.per_host, str(found)) == ("h100", 3, 4, "h100:3x4")
    assert [(d.process_index, d.id) for d in found.devices] == [(i // 4, i) for i in range(12)]
    found = target("cpu:4")  # the virtual devices of this process
    assert found.devices == tuple(jax.devices("cpu")[:4])
    assert (found.hosts, found.per_host, found.memory_bytes, found.chip, str(found)) == (1, 4, None, None, "cpu:4")


@pytest.mark.aot
@pytest.mark.parametrize("kind", GPUS)
@pytest.mark.default_ids("h100")
def test_every_gpu_kind_compiles_matrix_products_and_collectives(kind):
    found = target(f"{kind}:1x8")
    assert found.description == GPUS[kind].name == found.devices[0].device_kind
    assert found.memory_bytes == GPUS[kind].memory_bytes
    text = compiled(found.devices, lambda x: jax.lax.psum(x @ x.T, "data"), shape=(1024, 128), dtype=jnp.bfloat16)
    assert "is_scheduled=true" in text
    assert "num_partitions=8" in text
    assert "all-reduce" in text


GRAMMAR = r"KIND:HOSTSxPER_HOST.*h100:8x8.*cluster.toml:8x8.*cpu:8"
BAD = ["", "h100", "h100:8", "h100:0x8", "h100:8x8x8", "cpu:1x8", "cluster.toml:8"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, f"{GRAMMAR}; given {name!r}") for name in BAD),
        ("h10:8x8", r"must be one of a100, h100, .*; given .*; did you mean h100\?$"),
        ("cpu:99", r"needs 99 CPU devices and this process has 8: .*JAX_NUM_CPU_DEVICES=99"),
    ],
)
def test_bad_targets_are_refused_with_the_fix(name, message):
    with pytest.raises(ValueError, match=message):
        target(name)


@pytest.mark.aot
def test_a_missing_compiler_is_one_command_away(monkeypatch):
    real, versions = importlib.metadata.version, {"jax-cuda13-pjrt": ""}

    def version(name: str) -> str:
        if versions.get(name) == "":
            raise importlib.metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ValueError, match=r"GPU compiler, which is not installed: pip install 'jdp\[aot\]'$"):
        target("h100:1x8")
    jaxlib = importlib.metadata.version("jaxlib")
    versions["jax-cuda13-pjrt"] = "0.9.9"
    with pytest.raises(ValueError, match=r"jax-cuda13-pjrt is 0\.9\.9, jaxlib is") as error:
        target("h100:1x8")
    assert f"pip install 'jax-cuda13-plugin=={jaxlib}' 'jax-cuda13-pjrt=={jaxlib}'" in str(error.value)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("kind", "multiply_adds", "ghz", "nvlink_gb_s", "card_gbit_s"),
    [
        ("a100", 1024, 1.41, 600, 200),
        ("h100", 2048, 1.83, 900, 400),
        ("h200", 2048, 1.83, 900, 400),
        ("b200", 4096, 1.835, 1800, 400),
    ],
)
def test_peaks_and_links_are_those_of_data_sheets(kind, multiply_adds, ghz, nvlink_gb_s, card_gbit_s):
    """bf16 multiply-adds a core and clock (architecture whitepapers; the B200's from XLA's description of it) at the
    tensor cores' clock. With 2:4 sparsity, as the headlines have it, the peaks would be twice as high."""
    gpu = GPUS[kind]
    # NVIDIA rounds to two or three digits, and gives the B200's without its clock.
    assert gpu.matmul_flops["bf16"] == pytest.approx(2 * gpu.cores * multiply_adds * ghz * 1e9, rel=0.012)
    assert gpu.matmul_flops["f32"] == pytest.approx(gpu.matmul_flops["bf16"] / 2, rel=0.025)  # TF32: "1.1" of 2.25
    assert gpu.matmul_flops["s8"] == pytest.approx(gpu.matmul_flops["bf16"] * 2, rel=0.001)
    assert gpu.vector_flops == pytest.approx(2 * gpu.cores * gpu.lanes * gpu.clock_ghz * 1e9, rel=0.01)
    assert (gpu.link_bandwidth, gpu.network_bandwidth) == (nvlink_gb_s * 1e9 / 2, card_gbit_s * 1e9 / 8)
    assert 0.8 <= gpu.link_efficiency < gpu.network_efficiency < 1


def cluster(folder: Path, text: str, shape: str = "1x8") -> Target:
    (folder / "cluster.toml").write_text(text)
    return target(f"{folder / 'cluster.toml'}:{shape}")


@pytest.mark.aot
def test_a_cluster_file_changes_a_known_gpu(tmp_path):
    found = cluster(
        tmp_path,
        """
        like = "h100"
        name = "H100 of ours"
        memory_gib = 64
        network_bandwidth_gb_s = 12.5
        network_latency_us = 10
        matmul_tflops = { bf16 = 756 }
        """,
        "2x4",
    )
    chip, h100 = found.chip, GPUS["h100"]
    assert (found.hosts, found.per_host, len(found.devices)) == (2, 4, 8)
    assert found.description == found.devices[0].device_kind == "H100 of ours"
    assert found.memory_bytes == chip.memory_bytes == 64 * GIB
    assert (chip.network_bandwidth, chip.network_latency, chip.matmul_flops["bf16"]) == (12.5e9, 10 * 1e-6, 756e12)
    assert (chip.link_bandwidth, chip.matmul_flops["f32"]) == (h100.link_bandwidth, h100.matmul_flops["f32"])
    assert h100.matmul_flops["bf16"] == 989.4e12  # the table is as it was
    assert str(found) == f"{tmp_path / 'cluster.toml'}:2x4"
    assert "is_scheduled=true" in compiled(found.devices, lambda x: jax.lax.psum(x, "data"))


REFUSED = {
    "network_bandwith_gb_s = 5": r"given 'network_bandwith_gb_s'; did you mean network_bandwidth_gb_s\?",
    "matmul_tflops = { bf15 = 5 }": r"type of matmul_tflops must be .*; given 'bf15'; did you mean bf16\?",
    "matmul_tflops = 5": r"matmul_tflops must be a table such as \{ bf16 = 990 \}; given 5",
    "memory_gib = 0": "memory_gib must be a positive number; given 0",
    "link_efficiency = 1.2": "link_efficiency must be a positive number of at most 1; given 1.2",
    "name = ''": "name must be one line without quotes or backslashes; given ''",
    "cores =": "is not valid TOML",
    'like = "h10"': r"like must name the GPU to start from, one of a100, .*; given 'h10'; did you mean h100\?",
}


@pytest.mark.parametrize(("line", "message"), REFUSED.items())
def test_a_mistake_in_a_cluster_file_is_named(tmp_path, line, message):
    with pytest.raises(ValueError, match=message) as error:
        cluster(tmp_path, line if line.startswith("like") else f'like = "h100"\n{line}\n')
    assert str(tmp_path / "cluster.toml") in str(error.value)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory) -> str:
    """What XLA writes of the device when it compiles for our own description of an H100."""
    folder = tmp_path_factory.mktemp("dump")
    compiled(target("h100:1x8").devices, lambda x: jax.lax.psum(x, "data"), xla_dump_to=str(folder))
    (text,) = folder.glob("*gpu_target_config.pbtxt")
    return text.read_text()


@pytest.mark.aot
def test_xla_understands_our_description_as_it_is_meant(dumped):
    assert differences("h100", dumped) == []
