"""The batch normalisation of `jdp.models`: rows of padding change nothing, on whichever device they are."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jdp
from jdp.models.resnet import BatchNorm

KEY = jax.random.key(3)


def normalised(norm, x, mask):
    y = norm(x, mask=mask[:, None, None, None])
    return y, norm.mean[...], norm.var[...]


def test_statistics_are_over_all_devices_weighted_rows_however_unevenly_distributed():
    x = jax.random.normal(KEY, (16, 3, 3, 4)) * 2 + 1
    mask = jnp.arange(16) < 9  # four devices with both rows, one with one, three with none
    expected = normalised(BatchNorm(4, rngs=nnx.Rngs(0)), x, mask)

    def local(x, mask):
        return normalised(BatchNorm(4, axis_name=("replica", "data"), rngs=nnx.Rngs(0)), x, mask)

    mesh, spec = jdp.make_mesh(replica=2, data=4), jax.P(("replica", "data"))
    shards = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=(spec, jax.P(), jax.P())))(x, mask)
    for got, want in zip(shards, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)  # sums in another order
    np.testing.assert_allclose(expected[1], 0.01 * x[:9].mean((0, 1, 2)), rtol=1e-4, atol=1e-6)


def test_a_batch_of_padding_leaves_the_averages_alone_and_is_finite():
    norm = BatchNorm(4, rngs=nnx.Rngs(0))
    y, mean, variance = normalised(norm, jnp.ones((2, 3, 3, 4)), jnp.zeros(2, bool))
    assert jnp.all(jnp.isfinite(y)) and jnp.all(mean == 0) and jnp.all(variance == 1)
