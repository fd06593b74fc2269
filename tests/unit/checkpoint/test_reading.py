"""Arrays are read onto any shards from any stored ones, of every kind of number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jdp
from jdp.checkpoint.memory.exchange import assembled, part_numbers
from jdp.checkpoint.memory.layout import Grid

MESH = jdp.make_mesh(data=4, model=2)
SPECS = [
    PartitionSpec(*spec) for spec in ((), ("data",), (None, ("data", "model")), ("model", "data"), (None, "model"))
]


def given(spec, dtype="float32", shape=(8, 16, 6)):
    values = np.random.default_rng(0).integers(-8, 8, shape).astype(jnp.dtype(dtype))
    return jax.device_put(values, NamedSharding(MESH, spec))


@pytest.mark.parametrize("saved", SPECS)
def test_any_shards_are_read_from_any_parts(saved):
    x = given(saved)
    grid = Grid("float32", x.shape, x.sharding.shard_shape(x.shape), 7)
    parts = {grid.number(each.index): np.asarray(each.data).reshape(-1).view(np.uint8) for each in x.addressable_shards}
    for spec in SPECS:
        onto = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(MESH, spec))
        read = assembled(grid, onto, {number: parts[number] for number in part_numbers(grid, onto)})
        assert read.sharding == onto.sharding
        np.testing.assert_array_equal(read, x)


KINDS = ("bool", "int4", "int8", "uint32", "int32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64")


@pytest.mark.parametrize("dtype", KINDS)
def test_every_kind_of_number_comes_back(tmp_path, dtype):
    saved = {"wide": given(SPECS[1], dtype), "one": given(SPECS[0], dtype, ()), "host": np.float64(1 / 3)}
    jdp.save(tmp_path / "saved", saved)
    read = jdp.restore(tmp_path / "saved", saved)
    jax.tree.map(np.testing.assert_array_equal, read, saved)
    assert jax.tree.map(lambda x: x.dtype, read) == jax.tree.map(lambda x: x.dtype, saved)
