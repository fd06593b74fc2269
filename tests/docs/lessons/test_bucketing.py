"""Buckets: which tensors, how many collectives, the same gradient, and the time model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from load import load

import jdp
from jdp.foresight.program.collectives import collectives, traffic

lesson = load("bucketing")
SIZES = {"0/kernel": 64, "0/bias": 8, "1/kernel": 64, "1/bias": 8}


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (0, [["1/bias"], ["1/kernel"], ["0/bias"], ["0/kernel"]]),
        (72, [["1/bias", "1/kernel"], ["0/bias", "0/kernel"]]),
        (100, [["1/bias", "1/kernel", "0/bias"], ["0/kernel"]]),
        (144, [["1/bias", "1/kernel", "0/bias", "0/kernel"]]),
    ],
)
def test_buckets_are_filled_from_the_last_layer(limit, expected):
    assert lesson.fill_buckets(SIZES, limit) == expected


def test_buckets_decide_the_number_of_collectives():
    mesh = jdp.make_mesh(devices=jax.devices()[:4], data=4)
    random, shapes = np.random.default_rng(0), {"kernel": (8, 8), "bias": (8,)}
    params = {f"{i}/{k}": jnp.asarray(random.normal(size=shapes[k]), "f") for i in range(3) for k in shapes}
    x = jnp.asarray(random.normal(size=(8, 8)), "f")
    right = jax.grad(lesson.loss)(params, x)
    for most in (0, 600, 1e6):
        buckets = lesson.fill_buckets({name: value.nbytes for name, value in params.items()}, most)
        for kind in ("naive", "overlapped"):
            run = lesson.program(kind, buckets, mesh).lower(params, x).compile()
            sent = collectives(run.as_text())
            assert len(sent) == len(buckets) and traffic(sent) == {"all-reduce": 3 * (64 + 8) * 4}
            # float32 sums of four devices in another order
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), run(params, x), right)


def test_the_fit_recovers_latency_and_bandwidth():
    alpha, beta = lesson.fit([(size, 3e-4 + size / 8e8) for size in lesson.SIZES])
    assert (alpha, beta) == (pytest.approx(3e-4), pytest.approx(8e8))


def test_the_best_number_of_buckets_is_the_root():
    def seconds(n):
        return lesson.simulate([1_000_000 // n] * n, backward=0.016, alpha=0.001, beta=2e7)

    assert seconds(1) == pytest.approx(0.016 + 0.001 + 0.05), "one for all is as slow as no overlap"
    assert seconds(8) == pytest.approx(0.016 / 8 + 8 * 0.001 + 0.05), "backward/n + n·α + bytes/β"
    assert min((1, 2, 4, 5, 8, 10, 16, 20), key=seconds) == 4  # √(0.016 / 0.001)
    assert lesson.simulate([100] * 4, backward=1.0, alpha=0.001, beta=1e9) == pytest.approx(1.001), "the last shows"


@pytest.mark.rest
def test_two_processes_measure():
    found = lesson.in_processes(lesson.__file__, 2, limits={"1/2": 0.5}, layers=2, width=16, rows=4, rounds=1)
    assert [size for size, _ in found["links"]] == lesson.SIZES and all(time > 0 for _, time in found["links"])
    assert found["counted"] == {way: len(sizes) for way, sizes in found["bytes"].items()}
    assert {sum(sizes) for sizes in found["bytes"].values()} == {2 * (16 * 16 + 16) * 4}
    assert all(set(kinds) == {"sync", "naive", "overlapped"} for kinds in found["ways"].values())
