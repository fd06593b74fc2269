"""Arrays are read from the ranges of their chunks: any box of any chunks, of every kind of number, also compressed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jdp
from jdp.checkpoint.format import arrays, committing
from jdp.checkpoint.format.chunk_table import chunk_table

MESH = jdp.make_mesh(data=4, model=2)
SPECS = [
    PartitionSpec(*spec) for spec in ((), ("data",), (None, ("data", "model")), ("model", "data"), (None, "model"))
]


def given(spec, dtype="float32", shape=(8, 16, 6)):
    values = np.random.default_rng(0).integers(-8, 8, shape).astype(jnp.dtype(dtype))
    return jax.device_put(values, NamedSharding(MESH, spec))


@pytest.mark.parametrize("least", [64, 2**20])
def test_any_shards_are_read_from_any_chunks(tmp_path, monkeypatch, least):
    monkeypatch.setattr(arrays, "_PIECE", least)
    monkeypatch.setattr(arrays, "_COPIED", least)
    monkeypatch.setattr(arrays, "_AT_ONCE", 16 * least)
    saved = {str(i): given(spec) for i, spec in enumerate(SPECS)}
    jdp.save(tmp_path / "saved", saved)
    for turn in range(len(SPECS)):
        onto = {name: given(SPECS[(int(name) + turn) % len(SPECS)]) for name in saved}
        for name, read in jdp.restore(tmp_path / "saved", onto).items():
            assert read.sharding == onto[name].sharding
            np.testing.assert_array_equal(read, saved[name])


KINDS = ("bool", "int4", "int8", "uint32", "int32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64")


@pytest.mark.parametrize("dtype", KINDS)
def test_every_kind_of_number_comes_back(tmp_path, dtype):
    saved = {"wide": given(SPECS[1], dtype), "one": given(SPECS[0], dtype, ()), "host": np.float64(1 / 3)}
    jdp.save(tmp_path / "saved", saved)
    read = jdp.restore(tmp_path / "saved", saved)
    jax.tree.map(np.testing.assert_array_equal, read, saved)
    assert jax.tree.map(lambda x: x.dtype, read) == jax.tree.map(lambda x: x.dtype, saved)


def test_an_old_checkpoint_whose_arrays_are_compressed_is_read(tmp_path, monkeypatch):
    plain = committing._Arrays.__init__
    monkeypatch.setattr(
        committing._Arrays, "__init__", lambda self, *, use_compression, **others: plain(self, **others)
    )
    saved = {"w": given(SPECS[1]), "b": given(SPECS[0])}
    jdp.save(tmp_path / "saved", saved)
    monkeypatch.undo()
    assert chunk_table(tmp_path / "saved" / "state") == {}
    onto = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=given(SPECS[3]).sharding), saved)
    jax.tree.map(np.testing.assert_array_equal, jdp.restore(tmp_path / "saved", onto), saved)


def test_a_tree_of_many_nodes_is_read(tmp_path):
    import tensorstore as ts

    config = {"max_decoded_node_bytes": 400, "max_inline_value_bytes": 300}
    tree = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/", "config": config}).result()
    kind = {"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "<i4", "compressor": None, "filters": None}
    with ts.Transaction() as together:
        for i in range(60):
            tree.with_transaction(together)[f"w{i:02d}/.zarray"] = json.dumps(kind | {"order": "C"}).encode()
            tree.with_transaction(together)[f"w{i:02d}/0"] = np.int32(i).tobytes()
    table = chunk_table(tmp_path)
    assert sorted(table) == [f"w{i:02d}" for i in range(60)]
    for i, chunks in enumerate(table[name] for name in sorted(table)):
        assert chunks.ranges["0"].known == np.int32(i).tobytes()
