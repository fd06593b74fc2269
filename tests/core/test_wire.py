"""Encoded gradients and buckets: what is sent adds up to what was computed, whatever the encoding loses on the way.

The loss is linear in the parameters, so that a step's gradient does not depend on them: after any number of steps of
SGD the weights differ from those of plain training, a sum of matrices (`exact`), by exactly what error feedback still
keeps.
"""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jdp
from jdp.base import notices
from jdp.core.gradients import accumulate
from jdp.core.state import ERROR
from jdp.core.wire.buckets import matrices
from jdp.core.wire.encodings import decode, decode_weights, encode, encode_weights, from_rows, to_rows

ROWS, RATE = 16, 0.5
SHAPES = {"a": (24, 48), "b": (3, 16, 40), "c": (48,), "d": (7, 5)}
MESHES = {"8": {"data": 8}, "2x4": {"replica": 2, "data": 4}, "4x2": {"data": 4, "model": 2}}
SMALL = {"block": 8}
SCHEMES = {
    "bf16": jdp.Wire("bf16", **SMALL),
    "int8": jdp.Wire("int8", **SMALL),
    "fp8": jdp.Wire("fp8", **SMALL),
    "topk": jdp.Wire("topk", **SMALL, fraction=0.3),
    "powersgd": jdp.Wire("powersgd", rank=2),
}
MOST_LOST = {"bf16": 0.01, "int8": 0.02, "fp8": 0.06, "topk": 0.8, "powersgd": 1.0}  # of a mean gradient; 3 times seen


def init(rng):
    keys = jax.random.split(rng, len(SHAPES))
    return {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)}


def linear(params, batch, rng):
    """Each parameter times a matrix that the rows of the batch add up to; so the gradient has full rank."""
    total = sum((params[name] * jnp.tensordot(batch["x"] * batch["w"], batch[name], 1)).sum() for name in SHAPES)
    return jdp.Loss(total, batch["w"].sum())


def squared(params, batch, rng):
    hidden = jnp.tanh(batch["x"] @ params["a"][:ROWS]) @ params["a"].T + params["c"][:24]
    return jdp.Loss((hidden**2).sum(), jnp.float32(batch["x"].shape[0]))


@functools.cache
def batch(step):
    """Rows whose weights differ, in steps whose weights differ by a hundred."""
    random = np.random.default_rng(step)
    rows = {name: random.normal(size=(ROWS, *shape)).astype(np.float32) for name, shape in SHAPES.items()}
    weights = (100, 1, 10)[step % 3] * random.uniform(0.5, 1.5, size=ROWS)
    return {"x": random.normal(size=ROWS).astype(np.float32), "w": weights.astype(np.float32), **rows}


def plan_of(strategy, mesh="8", **settings):
    axes = MESHES[mesh]
    rules = [("a", P(None, "model")), ("b", P(None, None, "model"))] if "model" in axes else []
    return jdp.Plan(jdp.make_mesh(**axes), strategy, rules=rules, min_shard_size=8, **settings)


def zeros(rng):
    return {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def trained(plan, wire=None, **settings):
    """Return the state after three steps from zero, and the step."""
    state = jdp.init_state(zeros, optax.sgd(RATE), plan, rng=jax.random.key(0))
    step = jdp.make_train_step(linear, plan, wire=wire, partitioning="manual", check_loss=False, **settings)
    for i in range(3):
        state, _ = step(state, batch(i))
    return state, step


def gradient(name, of):
    """A parameter's gradient over the rows of a batch, in float64."""
    weights = of["w"].astype(np.float64)
    return np.tensordot(of["x"] * weights, of[name].astype(np.float64), 1) / weights.sum()


def exact(name, shape):
    """A parameter after plain training, as `trained`; in the shape in which it rests, which may be flat and padded."""
    weights = -RATE * sum(gradient(name, batch(i)) for i in range(3))
    return np.pad(weights.ravel(), (0, math.prod(shape) - weights.size)).reshape(shape)


# Codes of rows of one size (bf16, int8, fp8) go one way, so int8 goes it with every strategy and the others with one.
ALONE = [(scheme, strategy, "8") for scheme in ("int8", "topk", "powersgd") for strategy in ("ddp", "zero1")]
ALONE += [("bf16", "ddp", "8"), ("fp8", "zero1", "8")]
ALONE += [(scheme, "zero2", "8") for scheme in ("int8", "topk")]  # every microbatch's: a code of the rows, one of parts
ACROSS = [(scheme, "zero1", mesh) for scheme in ("int8", "topk", "powersgd") for mesh in ("2x4", "4x2")]


@pytest.mark.parametrize(
    ("scheme", "strategy", "mesh"), [*ALONE, *ACROSS, ("int8", "ddp", "4x2"), ("int8", "zero2", "2x4")]
)
def test_what_is_sent_and_what_is_kept_are_the_whole_gradient(scheme, strategy, mesh):
    accumulate = 2 if strategy == "zero2" else 1
    state, _ = trained(plan_of(strategy, mesh), SCHEMES[scheme], accumulate=accumulate)
    kept = jax.device_get(state.sync[ERROR])
    for name, weights in jax.device_get(state.params).items():
        missing = 0.0 if kept[name] is None else RATE * kept[name].sum(axis=0)
        plain = exact(name, weights.shape)
        # float32 sums of 16 rows and 3 steps, in another order
        np.testing.assert_allclose(weights - missing, plain, atol=1e-6, rtol=0, err_msg=name)
        assert np.abs(weights - plain).max() <= MOST_LOST[scheme] * np.abs(plain).max(), name
    lost = {name: float(np.abs(error).max()) for name, error in kept.items() if error is not None}
    assert lost, "something must have been encoded"
    assert all(value > 0 for value in lost.values()), lost


@pytest.mark.parametrize(
    ("strategy", "mesh", "buckets"),
    [
        *(("ddp", "2x4", buckets) for buckets in (1, 6000)),
        *(("zero1", "8", "auto"), ("zero2", "4x2", 1)),
        ("zero3", "8", "auto"),
    ],
)
def test_buckets_change_nothing_but_the_number_of_collectives(strategy, mesh, buckets):
    state, _ = trained(plan_of(strategy, mesh), buckets=buckets)
    for name, weights in jax.device_get(state.params).items():
        np.testing.assert_allclose(weights, exact(name, weights.shape), atol=3e-5, rtol=0, err_msg=name)
    assert state.sync == {}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_buckets_fill_in_the_order_of_the_backward_pass(precision, monkeypatch):
    """The last layer's gradient is the first; casts between the pass and the sums do not hide it."""
    orders, real = [], accumulate._ready_first

    def seen(*given):
        found = real(*given)
        orders.append(found.synchroniser.order)
        return found

    def layers(params, batch, rng):
        x = batch["x"].astype(params["0"].dtype)
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        return jdp.Loss((x.astype(jnp.float32) ** 2).sum(), jnp.float32(len(x)))

    monkeypatch.setattr(accumulate, "_ready_first", seen)
    start = lambda rng: {name: jnp.eye(16) for name in "012"}  # noqa: E731
    state = jdp.abstract_state(start, optax.sgd(RATE), plan_of("ddp"), rng=jax.random.key(0))
    step = jdp.make_train_step(layers, plan_of("ddp"), buckets=512, precision=precision, check_loss=False)
    step.lower(state, {"x": jax.ShapeDtypeStruct((ROWS, 16), jnp.float32)})
    assert set(orders) == {(2, 1, 0)}


@pytest.mark.parametrize(
    ("strategy", "mesh", "settings"),
    [
        *(("zero3", mesh, {"accumulate": 2}) for mesh in MESHES),
        *(("ddp", "2x4", {}), ("zero2", "8", {"accumulate": 2})),
    ],
)
def test_rounding_without_error_feedback_is_right_on_average(strategy, mesh, settings):
    """The mean of n steps' gradients, of the same weights and batch, comes close to it, as one over the root of n."""
    plan, steps, wire = plan_of(strategy, mesh), 64, replace(SCHEMES["int8"], error_feedback=strategy == "zero3")
    state = jdp.init_state(zeros, optax.sgd(RATE), plan, rng=jax.random.key(0))
    step = jdp.make_train_step(linear, plan, wire=wire, check_loss=False, donate=False, **settings)
    first, again = (jax.device_get(step(state, batch(0))[0].params) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    for _ in range(steps):
        state, _ = jax.block_until_ready(step(state, batch(0)))  # many at once starve the threads of 8 CPU devices
    assert state.sync == {}
    for name in ("a", "b"):
        once = -RATE * gradient(name, batch(0))
        off = [np.sqrt(np.mean((moved[name] / n - once) ** 2)) for moved, n in ((first, 1), (state.params, steps))]
        assert 1e-5 < off[1] < off[0] / 6, off  # a thousand numbers and more: their spread is known to 3 %


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_microbatches_layers_and_devices_each_draw_their_own_rounding(overlap):
    """All have the same gradient: ones, and halves of an int8 code, each rounded up in k of 2 x 8 draws."""
    made = np.where(np.arange(64) % 2, 0.5 / 127, 1.0) * np.ones((4, 16, 1), np.float32)

    def loss(params, batch, rng):
        x = jdp.scan_layers(lambda layer, x: x + (layer * made[0]).sum(), params, batch)
        return jdp.Loss(x.sum(), jnp.float32(len(batch)))

    plan = plan_of("zero3")
    step = jdp.make_train_step(
        loss, plan, wire=SCHEMES["int8"], accumulate=2, overlap=overlap, check_loss=False, donate=False
    )
    state = jdp.init_state(lambda _: jnp.zeros(made.shape), optax.sgd(1.0), plan, rng=jax.random.key(0))
    after, _ = step(state, np.ones(ROWS, np.float32))
    second, _ = step(after, np.ones(ROWS, np.float32))
    both = (-np.asarray(after.params), np.asarray(after.params) - np.asarray(second.params))
    counts = [16 * 127 * moved[:, :, 1::2].reshape(4, -1) for moved in both]
    draws = np.concatenate(counts)  # of two steps and four layers
    np.testing.assert_allclose(draws, np.round(draws), atol=1e-2)
    assert abs(draws.mean() - 8) < 0.2 and abs(draws.std() - 2) < 0.1, (draws.mean(), draws.std())  # binomial: 8, 2
    assert np.abs(np.corrcoef(draws) - np.eye(8)).max() < 0.25  # of 512 numbers: 5 sigma


def test_a_gradient_of_ones_own_loop_is_rounded_by_its_key():
    plan = plan_of("zero3")
    params = jdp.place(jax.tree.map(np.asarray, zeros(None)), plan)
    compute = jax.jit(jdp.value_and_grad(linear, plan, wire=SCHEMES["int8"], check_loss=False))
    found = [np.asarray(compute(params, batch(0), key)[1]["a"]) for key in jax.random.split(jax.random.key(0), 64)]
    np.testing.assert_array_equal(
        compute(params, batch(0), jax.random.split(jax.random.key(0), 64)[0])[1]["a"], found[0]
    )
    one, mean = (np.sqrt(np.mean((g - gradient("a", batch(0))) ** 2)) for g in (found[0], np.mean(found, axis=0)))
    assert 1e-5 < mean < one / 6


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_int8_weights_are_what_the_model_computes_with(strategy):
    plan, wire = plan_of(strategy), jdp.Wire(weights="int8", **SMALL)
    state = jdp.init_state(init, optax.sgd(RATE), plan, rng=jax.random.key(0))
    step = jdp.make_train_step(squared, plan, wire=wire, check_loss=False, donate=False)
    inputs = {"x": np.random.default_rng(0).normal(size=(ROWS, ROWS)).astype(np.float32)}
    _, metrics = step(state, inputs)

    def rounded(placement, weights):
        rows = to_rows(weights, placement.dim, 8)
        padded = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % 8)))
        return from_rows(decode_weights(encode_weights(padded, 8), 8)[:, : rows.shape[1]], weights.shape, placement.dim)

    placements = plan.param_placements(state.params)

    @jax.jit
    def expected(weights):
        used = {"a": rounded(placements["a"], weights["a"]), "c": weights["c"]}
        return [squared(each, inputs, None).total / ROWS for each in (used, weights)]

    narrow, wide = expected(jax.device_get(state.params))
    np.testing.assert_allclose(metrics["loss"], narrow, rtol=1e-5)  # float32
    assert abs(narrow / wide - 1) > 1e-5, "rounding must show"
    assert jax.tree.all(jax.tree.map(lambda x: x.dtype == jnp.float32, state.params))


def test_a_step_that_is_skipped_keeps_what_was_kept():
    state, step = trained(plan_of("zero1"), SCHEMES["int8"], donate=False)
    values = [("a", bad) for bad in (np.nan, np.inf, -np.inf)] + [("w", bad) for bad in (0, np.nan, np.inf)]
    for name, bad in values:
        after, _ = step(state, {**batch(0), name: np.full_like(batch(0)[name], bad)})
        assert int(after.skipped) == 1, (name, bad)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(after.sync), jax.device_get(state.sync))


@pytest.mark.parametrize("scheme", ["bf16", "int8", "fp8"])
def test_rounding_is_right_on_average_and_off_by_a_code_at_most(scheme):
    wire, random = jdp.Wire(scheme), np.random.default_rng(1)
    rows = (random.normal(size=(512, 256)) * 2.0 ** np.arange(512)[:, None].clip(0, 40)).astype(np.float32)
    codes = jax.jit(functools.partial(encode, wire))(rows, jax.random.key(0))
    assert codes.nbytes == 512 * wire.row_bytes(256)
    largest = np.abs(rows).max(axis=1, keepdims=True)
    fp8 = np.maximum(np.abs(rows) / 8, largest / 448 / 512)
    step = {"bf16": np.abs(rows) * 2.0**-7, "int8": largest / 127, "fp8": fp8}
    error = np.asarray(jax.jit(lambda codes: decode(wire, codes, 256))(codes)) - rows
    assert (np.abs(error) <= 1.001 * step[scheme]).all()
    assert abs(float((error / step[scheme]).mean())) < 5 / np.sqrt(rows.size)  # a mean of numbers within 1, 5 sigma


@pytest.mark.parametrize("scheme", ["bf16", "int8", "fp8", "topk"])
def test_what_is_not_finite_stays_so_and_zeros_stay_zeros(scheme):
    wire = jdp.Wire(scheme)
    there_and_back = jax.jit(lambda rows: decode(wire, encode(wire, rows, jax.random.key(0)), 256))
    assert not np.asarray(there_and_back(np.zeros((2, 256), np.float32))).any()
    for value in (np.nan, np.inf, -np.inf):
        rows = np.ones((2, 256), np.float32)
        rows[1, 7] = value
        assert not np.isfinite(there_and_back(rows)[1]).all(), value


def test_topk_of_everything_is_everything():
    rows = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    wire = jdp.Wire("topk", fraction=1.0)
    np.testing.assert_array_equal(jax.jit(lambda rows: decode(wire, encode(wire, rows, None), 64))(rows), rows)


def test_rows_and_matrices_of_a_leaf():
    x = np.arange(4 * 6 * 10.0, dtype=np.float32).reshape(4, 6, 10)
    cuts = ((0, 2), (1, 3), (2, 5), (None, 7))
    made = jax.jit(lambda x: [to_rows(x, *cut) for cut in cuts])(x)
    back = jax.jit(lambda made: [from_rows(r, x.shape, dim) for r, (dim, _) in zip(made, cuts, strict=True)])(made)
    for (_, count), rows, whole in zip(cuts, made, back, strict=True):
        assert rows.shape == (count, -(-x.size // count))
        np.testing.assert_array_equal(whole, x)
    np.testing.assert_array_equal(np.asarray(made[1])[2].reshape(4, 2, 10), x[:, 4:])
    assert [matrices(s) for s in ((8, 4), (12, 8, 4), (12, 8, 2, 4))] == [(1, 8, 4), (12, 8, 4), (12, 8, 8)]


# What is kept between steps.


def test_what_is_kept_is_each_devices_own_and_planned_as_such():
    plan = plan_of("zero1", "2x4")
    step = jdp.make_train_step(linear, plan, wire="powersgd")
    state = step.complete(jdp.abstract_state(init, optax.sgd(RATE), plan, rng=jax.random.key(0)))
    assert state.sync[ERROR]["a"].shape == (8, 24, 48)
    assert state.sync[ERROR]["a"].sharding.shard_shape((8, 24, 48)) == (1, 24, 48)
    assert state.sync[ERROR]["c"] is None and state.sync["factor"]["b"].shape == (3, 40, 4)
    placed = {p.path: p for p in plan.placements(state)}
    assert placed[f"sync/{ERROR}/a"].bytes_per_device == 4 * 24 * 48
    assert "own" in placed[f"sync/{ERROR}/a"].reason
    assert step.complete(state) is state


def test_a_checkpoint_carries_it_to_other_devices_other_settings_and_plain_steps(tmp_path):
    state, _ = trained(plan_of("zero1"), SCHEMES["int8"])
    kept = jax.device_get(state.sync[ERROR])
    jdp.save(tmp_path / "8", state)

    def target(mesh, wire):
        plan = jdp.Plan(mesh, "zero1", min_shard_size=8)
        step = jdp.make_train_step(linear, plan, wire=wire, check_loss=False)
        return step, step.complete(jdp.abstract_state(init, optax.sgd(RATE), plan, rng=jax.random.key(0)))

    same = jdp.restore(tmp_path / "8", target(jdp.make_mesh(), SCHEMES["int8"])[1])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(same.sync[ERROR]), kept)

    notices._said.clear()
    step, four = target(jdp.make_mesh(devices=jax.devices()[:4], data=4), SCHEMES["int8"])
    fewer = jdp.restore(tmp_path / "8", four)
    for name, error in jax.device_get(fewer.sync[ERROR]).items():
        if error is not None:
            assert error.shape[0] == 4
            before = 0 if kept[name] is None else kept[name].sum(axis=0)  # too small to be encoded on 8
            np.testing.assert_allclose(error.sum(axis=0), before, atol=1e-5)  # sums of 8 and of 4
    assert any("shared out" in said for said in notices._said)
    assert int(step(fewer, batch(3))[0].step) == 4

    plain_again = jdp.restore(tmp_path / "8", target(jdp.make_mesh(), None)[1])
    assert plain_again.sync == {} and any("left unread" in said for said in notices._said)
    jdp.save(tmp_path / "plain", plain_again)
    started = jdp.restore(tmp_path / "plain", target(jdp.make_mesh(), SCHEMES["topk"])[1])
    assert not started.sync[ERROR]["a"].any() and any("start at zero" in said for said in notices._said)

    notices._said.clear()  # an older checkpoint: what was lost of the sum of gradients, whatever its weight
    jdp.save(tmp_path / "old", replace(state, sync={"error": state.sync[ERROR]}))
    old = jdp.restore(tmp_path / "old", target(jdp.make_mesh(), SCHEMES["int8"])[1])
    assert not old.sync[ERROR]["a"].any() and any(
        "left unread; the first is sync/error" in said for said in notices._said
    )


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ("8", {"wire": SCHEMES["int8"]}),
        ("8", {"wire": SCHEMES["topk"]}),
    ],
)
def test_a_step_takes_states_of_several_shapes(mesh, settings):
    def loss(params, batch, rng):
        return jdp.Loss(((batch @ params) ** 2).sum(), jnp.float32(len(batch)))

    plan = plan_of("zero1", mesh)
    step = jdp.make_train_step(loss, plan, check_loss=False, **settings)
    for width in (16, 24, 16):
        state = jdp.init_state(lambda _, w=width: jnp.ones((8, w)), optax.sgd(0.1), plan, rng=jax.random.key(0))
        for _ in range(2):
            state, metrics = step(state, np.ones((ROWS, 8), np.float32))
        assert np.isfinite(metrics["loss"]) and int(state.step) == 2
        assert {leaf.shape[-1] for leaf in jax.tree.leaves(state.sync) if leaf.ndim} == {width}


# The contract.


@pytest.mark.parametrize(
    ("wire", "most", "strategy"),
    [
        *(("int8", 0.27, strategy) for strategy in ("ddp", "zero1", "zero2", "zero3")),
        *(("fp8", 0.27, "zero1"), ("bf16", 0.51, "ddp"), ("bf16", 0.51, "zero3")),  # as int8, with codes of other sizes
    ],
)
def test_gradients_take_a_share_of_the_bytes_and_the_contract_knows_them(strategy, wire, most):
    def reduced(report):
        return sum(row.wire_bytes for row in report.rows if row.kind != "all-gather" or strategy == "ddp")

    report = report_of(strategy, wire)
    assert reduced(report) <= most * reduced(report_of(strategy, None))
    assert report.kept and report.ratio <= 1.001, str(report)


@functools.cache
def report_of(strategy, wire, target=None, **settings):
    plan = jdp.Plan(jdp.make_mesh(), strategy)
    shapes = {"up": (128, 512), "down": (512, 128)}

    def loss(params, batch, rng):
        x = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
        return jdp.Loss((x**2).sum(), jnp.float32(x.shape[0]))

    state = jdp.abstract_state(
        lambda rng: {name: jnp.zeros(shape) for name, shape in shapes.items()},
        optax.sgd(RATE),
        plan,
        rng=jax.random.key(0),
    )
    step = jdp.make_train_step(loss, plan, wire=wire, partitioning="manual", **settings)
    return jdp.verify(step, state, {"x": jax.ShapeDtypeStruct((64, 128), jnp.float32)}, target, cache=False)


@pytest.mark.parametrize("wire", ["topk", "powersgd", jdp.Wire("int8", weights="int8")])
def test_every_encoding_keeps_its_row(wire):
    report = report_of("zero1", wire)
    assert report.kept and report.ratio <= 1.001, str(report)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_buckets_are_counted(strategy):
    kind = "all-reduce" if strategy == "ddp" else "reduce-scatter"
    (row,) = [row for row in report_of(strategy, None, buckets="auto").rows if row.kind == kind]
    assert 1 <= row.count <= row.most <= 2
    assert report_of(strategy, None, buckets="auto").kept


@pytest.mark.aot
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_int8_on_the_wire_of_real_gpus(strategy):
    report = report_of(strategy, jdp.Wire("int8", weights="int8"), "h100:1x8")
    assert report.kept, str(report)
    assert report.wire_bytes_per_device <= 0.27 * report_of(strategy, None).wire_bytes_per_device


@pytest.mark.parametrize("settings", [{"wire": "int8"}, {"wire": "powersgd"}, {"buckets": "auto"}])
def test_parameters_too_small_to_shard_share_a_bucket_by_plan(settings):
    def loss(params, batch, rng):
        x = jnp.tanh(batch["x"] @ params["up"] + params["bias"]) @ params["down"] + params["shift"]
        return jdp.Loss((x**2).sum(), jnp.float32(x.shape[0]))

    shapes = {"up": (64, 256), "bias": (256,), "down": (256, 16), "shift": (16,)}
    plan = jdp.Plan(jdp.make_mesh(), "zero1")
    start = lambda rng: {name: jnp.zeros(shape) for name, shape in shapes.items()}  # noqa: E731
    state = jdp.abstract_state(start, optax.sgd(RATE), plan, rng=jax.random.key(0))
    step = jdp.make_train_step(loss, plan, partitioning="manual", **settings)
    report = jdp.verify(step, state, {"x": jax.ShapeDtypeStruct((64, 64), jnp.float32)}, cache=False)
    assert report.kept and not report.strays, str(report)


# What is refused.


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"buckets": 0}, "at least 1"),
        ({"buckets": "big"}, "at least 1"),
        ({"wire": "int7"}, "did you mean int8"),
        ({"wire": 8}, "given 8. Give one of these"),
        ({"wire": "int8", "partitioning": "auto"}, "leave partitioning out"),
        ({"buckets": "auto", "partitioning": "auto"}, "leave partitioning out"),
    ],
)
def test_settings_out_of_range(given, words):
    with pytest.raises(ValueError, match=words):
        jdp.make_train_step(linear, plan_of("ddp"), **given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rank": 0}, "1 or more"),
        ({"fraction": 1.5}, "up to 1"),
        ({"fraction": 0}, "above 0"),
        ({"block": 4}, "8 or more"),
        ({"gradients": "topk", "error_feedback": False}, "error feedback"),
        ({"weights": "fp8"}, "int8"),
        ({"gradients": "int8", "rank": 8}, 'a setting of "powersgd"'),
        ({"fraction": 0.1}, 'a setting of "topk"'),
    ],
)
def test_a_wire_out_of_range(given, words):
    with pytest.raises(ValueError, match=words):
        jdp.Wire(**given)


def test_weights_that_nobody_gathers_are_said_to_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(notices, "_said", set())
    jdp.make_train_step(linear, plan_of("ddp"), wire=jdp.Wire(weights="int8"))
    assert any("ddp gathers no weights" in message for message in notices._said)


@pytest.mark.parametrize("wire", ["topk", "powersgd"])
def test_zero3_refuses_what_needs_error_feedback(wire):
    with pytest.raises(ValueError, match="take zero2"):
        jdp.make_train_step(linear, plan_of("zero3"), wire=wire)


@pytest.mark.aot
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_real_gpus_keep_the_buckets_apart(strategy):
    """XLA joins collectives that do not depend on each other into one, which then waits for the last gradient."""
    kind = "all-reduce" if strategy == "ddp" else "reduce-scatter"
    (row,) = [row for row in report_of(strategy, None, "h100:1x8", buckets=200_000).rows if row.kind == kind]
    assert row.count == row.most == 2
