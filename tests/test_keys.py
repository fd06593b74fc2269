"""A batch key draws exactly the rows of the global draw that its local rows stand for."""

import functools
import math

import jax
import jax.extend.random as jexr
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jdp
from jdp import keys, notices

KEY = jax.random.key(11)

BATCH = 24
LAYOUTS = [(1, 8), (4, 2), (3, 4), (24, 1), (6, 1)]  # (microbatches, shards): 3, 3, 2, 1 and 4 local rows


def places(count, shards):
    """Every (shard, microbatch) of a layout: its first global row, and all those it stands for."""
    rows = BATCH // count // shards
    for shard in range(shards):
        for microbatch in range(count):
            first = shard * (BATCH // shards) + microbatch
            yield first, first + count * np.arange(rows)


@functools.cache
def on_plain_key(draw):
    return jax.device_get(jax.jit(lambda: draw(KEY, BATCH))())


@functools.cache
def on_batch_key(draw, rows):
    return jax.jit(lambda offset, stride: draw(keys.batch_key(KEY, rows=rows, offset=offset, stride=stride), rows))


def check_rows(draw, layout, equal=np.testing.assert_array_equal):
    """`draw(key, rows)` -> arrays [rows, ...]: on batch keys it gives rows of what it gives on the plain key."""
    whole, local = on_plain_key(draw), on_batch_key(draw, BATCH // math.prod(layout))
    for first, indices in places(*layout):
        got = local(jnp.uint32(first), layout[0])
        jax.tree.map(lambda g, w, i=indices: equal(g, w[i]), got, whole)


def bits_and_masks(key, rows):
    shapes = [(rows,), (rows, 3, 7)]
    bits = [jax.random.bits(key, shape, dtype) for shape in shapes for dtype in (jnp.uint8, jnp.uint16, jnp.uint32)]
    tokens = jax.random.bernoulli(key, 0.5, (rows * 5, 2)).reshape(rows, 10)  # examples flattened into tokens
    return bits, tokens, [jax.random.bernoulli(key, 0.9, shape) for shape in shapes]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_draws_are_the_rows_of_the_global_draw(layout):
    check_rows(bits_and_masks, layout)


def test_draws_of_64_bits():
    with jax.enable_x64(True):
        check_rows(lambda key, rows: jax.random.bits(key, (rows, 5), jnp.uint64), (3, 4))


def test_what_is_made_of_bits_follows():
    """Within rounding: a shorter array may be vectorised another way."""

    def draw(key, rows):
        return jax.random.normal(key, (rows, 9)), jax.random.randint(key, (rows,), 0, 1000)

    check_rows(draw, (3, 4), functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6))


def test_fold_in_and_split_carry_the_rows_along():
    def draw(key, rows):
        folded = jax.random.fold_in(jax.random.fold_in(key, 3), 5)
        second = jax.random.split(key)[1]
        several = jax.random.split(jax.random.split(key, 5)[4], (2, 2))[1, 0]
        return [jax.random.bits(k, (rows, 4)) for k in (folded, second, several)]

    check_rows(draw, (3, 4))  # two local rows: a split in two is not one key an example
    check_rows(draw, (6, 1))


def test_one_key_an_example():
    """`split(key, rows)` yields the examples' own keys, which then draw for themselves."""

    def draw(key, rows):
        own = jax.random.split(key, rows)
        inner = jax.vmap(lambda k: jax.random.bits(jax.random.fold_in(k, 1), (4,)))  # 4 rows, and still plain
        return inner(own), jax.vmap(jax.random.bits)(own)

    check_rows(draw, (6, 1))
    check_rows(draw, (24, 1))


def test_draws_without_a_batch_dimension_are_the_plain_draws():
    key = keys.batch_key(KEY, rows=4, offset=jnp.uint32(8), stride=2)
    for shape in ((), (5,), (3, 4), (4, 0)):
        np.testing.assert_array_equal(jax.random.bits(key, shape), jax.random.bits(KEY, shape), strict=True)


def test_shards_of_a_mesh_assemble_the_global_masks():
    """Under shard_map over replica and data, as the manual step uses it, with the offset from the axis index."""
    mesh = jdp.make_mesh(replica=2, data=2, model=2)
    rows, axes = 5, ("replica", "data")

    def local(x):
        key = keys.batch_key(KEY, rows=rows, offset=jax.lax.axis_index(axes).astype(jnp.uint32) * rows, stride=1)
        return jax.random.bernoulli(key, 0.5, x.shape)

    masks = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=P(axes), out_specs=P(axes), axis_names=set(axes), check_vma=False)
    )(jnp.zeros((4 * rows, 16)))
    np.testing.assert_array_equal(masks, jax.random.bernoulli(KEY, 0.5, (4 * rows, 16)))


# Indices beyond 32 bits.

EDGES = [0, 1, 2, 3, 0xFFFF, 0x10000, 0x10001, 0x7FFFFFFF, 0x80000000, 0xFFFF0000, 0xFFFFFFFE, 0xFFFFFFFF]


def test_products_of_32_bit_numbers_are_exact():
    random = np.random.default_rng(0)
    factors = np.concatenate([np.array(EDGES), random.integers(0, 2**32, 200)]).astype(np.uint32)
    for b in [*EDGES, *map(int, random.integers(0, 2**32, 4))]:
        high, low = keys._multiply(factors, b)
        got = [(int(h) << 32) | int(w) for h, w in zip(high, low, strict=True)]
        assert got == [int(a) * b for a in factors], b


@pytest.mark.parametrize(
    ("offset", "stride", "size"),
    [(2**32 - 9, 2, 1), (858_993_459, 1, 5), (2**31, 3, 2), (1000, 7, 4_294_967), (2**32 - 30, 4, 2**20 - 3)],
)
def test_elements_beyond_two_to_the_32_have_indices_of_64_bits(offset, stride, size):
    """A global draw of more than 2**32 elements, of which we take a few rows."""
    rows = 4 if size < 100 else 1
    words = jnp.array([*jax.random.key_data(KEY), offset, stride], jnp.uint32)
    high, low = keys._row_counts(rows, words, (rows, size))
    index = (np.uint64(offset) + np.uint64(stride) * np.arange(rows, dtype=np.uint64))[:, None] * np.uint64(size)
    index = index + np.arange(size, dtype=np.uint64)
    np.testing.assert_array_equal((np.asarray(high, np.uint64) << np.uint64(32)) | np.asarray(low, np.uint64), index)


def test_a_draw_hashes_the_64_bit_index_of_each_element():
    offset, stride, size = 858_993_458, 1, 5  # rows 858,993,458 .. 461: the second crosses 2**32 within itself
    drawn = jax.random.bits(keys.batch_key(KEY, rows=4, offset=jnp.uint32(offset), stride=stride), (4, size))
    for row in range(4):
        for column in range(size):
            index = (offset + stride * row) * size + column
            count = jnp.array([index >> 32, index & 0xFFFFFFFF], jnp.uint32)
            first, second = jexr.threefry_2x32(jax.random.key_data(KEY), count)
            assert int(drawn[row, column]) == int(first) ^ int(second)
    assert offset * size < 2**32 < (offset + 1) * size + size


# Other generators.


def test_a_generator_without_indices_differs_by_shard_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(notices, "_said", set())
    caplog.set_level("INFO", "jdp")
    key = jax.random.key(0, impl="rbg")
    shards = [keys.batch_key(key, rows=4, offset=jnp.uint32(offset), stride=1) for offset in (0, 4)]
    first, second = (jax.random.bits(shard, (4, 8)) for shard in shards)
    assert not np.array_equal(first, second)
    [said] = [record.getMessage() for record in caplog.records if record.name == "jdp"]
    assert "dropout masks depend on the mesh: the PRNG rbg cannot be indexed by row" in said


def test_draws_that_split_keys_inside_are_per_example_too():
    """`jax.random.gamma` splits a key for each element: its rows are the global draw's as well."""
    whole = jax.random.gamma(KEY, 2.0, (24, 3))
    for rows, offset, stride in ((6, 0, 1), (6, 6, 1), (3, 1, 4)):
        drawn = jax.random.gamma(keys.batch_key(KEY, rows=rows, offset=offset, stride=stride), 2.0, (rows, 3))
        np.testing.assert_array_equal(drawn, whole[offset + stride * np.arange(rows)])
