"""Data parallelism by hand: replicas stay equal, uneven shards are averaged over rows, jdp computes the same."""

import jax
import numpy as np
import pytest
from load import load

lesson = load("simple_ddp")


def test_the_broadcast_makes_replicas_equal(mesh):
    (params, opt_state), before = lesson.same_start(mesh)
    assert lesson.distance(before) > 0.1
    assert lesson.distance(params) == lesson.distance(opt_state) == 0
    for after, drawn in zip(jax.tree.leaves(params), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(after[7], drawn[0])


def test_replicas_part_without_the_sum(mesh):
    assert lesson.train(mesh, "rows", 4)[1] == [0.0] * 5
    assert lesson.train(mesh, "nothing", 4)[1][-1] > 1e-3  # Adam moves a weight by up to 3e-3 a step


@pytest.mark.rest
def test_uneven_shards_need_the_mean_over_rows(mesh):
    uneven, even = np.array([4, 32] * 4), np.full(8, 32)
    assert lesson.error_of_uneven(mesh, "rows", uneven) < 1e-5  # sums of 256 float32 in another order
    assert lesson.error_of_uneven(mesh, "means", even) < 1e-5
    assert lesson.error_of_uneven(mesh, "means", uneven) > 0.1


def test_jdp_computes_the_same(mesh):
    found = lesson.against_jdp(mesh, 3, 1)
    assert found["weights apart, jdp and by hand"] < 1e-5  # float32 sums in another order, three steps of 3e-3
    assert found["dispatch, jdp / by hand"] > 0
