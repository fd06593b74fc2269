"""Encoded gradients: right on average, off by a code at most, and in the promised bytes; and XLA's buckets.

The loss is linear in the parameters, so that a step's gradient does not depend on them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from judged import judged
from trainings import abstract_step
from trainings import plan_of as _plan_of

import jdp
from jdp.core.compiling.options import Compiler

ROWS, RATE = 16, 0.5
SHAPES = {"a": (48, 96), "b": (3, 32, 40), "c": (48,), "d": (7, 5)}
MESHES = {"8": {"data": 8}, "2x4": {"replica": 2, "data": 4}, "4x2": {"data": 4, "model": 2}}


def linear(params, batch, rng):
    """Each parameter times a matrix that the rows of the batch add up to; so the gradient has full rank."""
    total = sum((params[name] * jnp.tensordot(batch["x"] * batch["w"], batch[name], 1)).sum() for name in SHAPES)
    return jdp.Loss(total, batch["w"].sum())


@functools.cache
def batch(step):
    random = np.random.default_rng(step)
    rows = {name: random.normal(size=(ROWS, *shape)).astype(np.float32) for name, shape in SHAPES.items()}
    weights = random.uniform(0.5, 1.5, size=ROWS)
    return {"x": random.normal(size=ROWS).astype(np.float32), "w": weights.astype(np.float32), **rows}


def plan_of(strategy, mesh="8"):
    axes = MESHES[mesh]
    rules = [("a", P(None, "model")), ("b", P(None, None, "model"))] if "model" in axes else []
    return _plan_of(strategy, rules=rules, **axes)


def zeros(rng):
    return {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def start(plan):
    return jdp.init_state(zeros, optax.sgd(RATE), plan, rng=jax.random.key(0))


def gradient(name, of):
    """A parameter's gradient over the rows of a batch, in float64."""
    weights = of["w"].astype(np.float64)
    return np.tensordot(of["x"] * weights, of[name].astype(np.float64), 1) / weights.sum()


@pytest.mark.parametrize(
    ("wire", "strategy", "mesh", "settings"),
    [
        ("int8", "ddp", "8", {}),
        ("int8", "zero1", "2x4", {"accumulate": 2}),
        ("int8", "zero3", "4x2", {"accumulate": 2}),
        ("bf16", "zero2", "2x4", {}),
    ],
)
@pytest.mark.default_ids("int8-ddp-8-settings0")
def test_rounding_is_right_on_average_and_small(wire, strategy, mesh, settings):
    """The mean of n steps' gradients, of the same weights and batch, comes close to it, as one over the root of n."""
    plan, steps = plan_of(strategy, mesh), 64
    step = jdp.make_train_step(linear, plan, wire=wire, check_loss=False, donate=False, **settings)
    state = start(plan)
    first, again = (jax.device_get(step(state, batch(0))[0].params) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    for _ in range(steps):
        state, _ = jax.block_until_ready(step(state, batch(0)))  # many at once starve the threads of 8 CPU devices
    after = jax.device_get(state.params)
    for name in SHAPES:
        once = -RATE * gradient(name, batch(0))
        off = [np.sqrt(np.mean((moved / n - once) ** 2)) for moved, n in ((first[name], 1), (after[name], steps))]
        if name in "cd":  # too small to be encoded
            assert max(off) < 1e-6, (name, off)
        else:  # a thousand numbers and more: their spread is known to 3 %
            assert 1e-5 < off[1] < off[0] / 6 and off[0] < 0.03 * np.std(once), (name, off)


def test_rounding_is_drawn_anew_everywhere():
    """All have the same gradient: ones, and halves of an int8 code, each rounded up in k of 2 x 8 draws."""
    made = np.where(np.arange(64) % 2, 0.5 / 127, 1.0) * np.ones((4, 32, 1), np.float32)

    def loss(params, batch, rng):
        x = jdp.scan_layers(lambda layer, x: x + (layer * made[0]).sum(), params, batch)
        return jdp.Loss(x.sum(), jnp.float32(len(batch)))

    plan = plan_of("zero3")
    step = jdp.make_train_step(loss, plan, wire="int8", accumulate=2, check_loss=False, donate=False)
    state = jdp.init_state(lambda _: jnp.zeros(made.shape), optax.sgd(1.0), plan, rng=jax.random.key(0))
    after, _ = step(state, np.ones(ROWS, np.float32))
    second, _ = step(after, np.ones(ROWS, np.float32))
    both = (-np.asarray(after.params), np.asarray(after.params) - np.asarray(second.params))
    counts = [16 * 127 * moved[:, :, 1::2].reshape(4, -1) for moved in both]
    draws = np.concatenate(counts)  # of two steps and four layers
    np.testing.assert_allclose(draws, np.round(draws), atol=1e-2)
    assert abs(draws.mean() - 8) < 0.2 and abs(draws.std() - 2) < 0.1, (draws.mean(), draws.std())  # binomial: 8, 2
    assert np.abs(np.corrcoef(draws) - np.eye(8)).max() < 0.17  # of 1024 numbers: 5 sigma


def test_a_nonfinite_gradient_skips_the_step():
    plan = plan_of("zero1")
    state, step = start(plan), jdp.make_train_step(linear, plan, wire="int8", check_loss=False, donate=False)
    for name, bad in [("a", np.nan), ("a", np.inf), ("a", -np.inf), ("w", 0), ("w", np.nan)]:
        after, _ = step(state, {**batch(0), name: np.full_like(batch(0)[name], bad)})
        assert int(after.skipped) == 1, (name, bad)
        jax.tree.map(np.testing.assert_array_equal, after.params, state.params)


@functools.cache
def report_of(strategy, wire, target=None, **settings):
    plan = jdp.Plan(jdp.make_mesh(), strategy)
    shapes = {"up": (128, 512), "bias": (512,), "down": (512, 128)}

    def loss(params, batch, rng):
        x = jnp.tanh(batch["x"] @ params["up"] + params["bias"]) @ params["down"]
        return jdp.Loss((x**2).sum(), jnp.float32(x.shape[0]))

    init = lambda rng: {name: jnp.zeros(shape) for name, shape in shapes.items()}  # noqa: E731
    step, state = abstract_step(loss, init, optax.sgd(RATE), plan, wire=wire, partitioning="manual", **settings)
    return judged(step, state, {"x": jax.ShapeDtypeStruct((64, 128), jnp.float32)}, target, cache=False)


@pytest.mark.parametrize(
    ("wire", "most", "strategy"),
    [*(("int8", 0.27, strategy) for strategy in ("ddp", "zero1", "zero3")), ("bf16", 0.51, "zero3")],
)
@pytest.mark.default_ids("int8-0.27-zero3")
def test_encoded_gradients_take_their_share_of_bytes(strategy, wire, most):
    """`bias` is too small to shard, and sent as it is."""

    def reduced(report):
        return sum(row.wire_bytes for row in report.rows if row.kind != "all-gather" or strategy == "ddp")

    report = report_of(strategy, wire)
    assert reduced(report) <= most * reduced(report_of(strategy, None))
    assert report.kept and not report.strays and report.ratio <= 1.01, str(report)


@pytest.mark.rest
@pytest.mark.aot
def test_int8_on_the_wire_of_real_gpus():
    report = report_of("zero3", "int8", "h100:1x8")
    assert report.kept, str(report)
    assert report.wire_bytes_per_device < report_of("zero3", None).wire_bytes_per_device


def test_buckets_are_thresholds_of_xlas_compiler_for_gpus(reported):
    step = jdp.make_train_step(linear, plan_of("ddp"), buckets=25 * 2**20, check_loss=False)
    names = {f"xla_gpu_{kind}_combine_threshold_bytes" for kind in ("all_gather", "all_reduce", "reduce_scatter")}
    assert Compiler.of("overlap", 5).settled.items() >= dict.fromkeys(names, 5).items()
    assert step.settings.compiler.settled == dict.fromkeys(names, 25 * 2**20)
    for changes in ({"accumulate": 2}, {"compiler": "default"}):
        assert step.changed(**changes).settings.compiler.buckets == 25 * 2**20
    assert step.compiler_options == {} and any("buckets is for" in said for said in reported())


@pytest.mark.aot
def test_gpus_join_collectives_up_to_the_buckets_size():
    counts = []
    for buckets in (1000, 2**30):
        sent = [each.collective for each in report_of("ddp", None, "h100:1x8", buckets=buckets).collectives]
        counts.append(sum(each.count for each in sent if each.kind == "all-reduce" and each.payload_bytes > 1000))
    assert counts == [3, 1]
