"""An update that mixes a matrix' elements runs on whole matrices, each on one device, and is that of one device.

The gradient is simple and of full rank: (weights - target), times what a batch has. The reference is a loop of plain
JAX and optax. float32 sums over devices run in another order; Newton-Schulz steps make 1e-6 of that at most.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jdp
from jdp.base import notices
from jdp.core.tracing.per_index import Along, Mixes, places_of
from jdp.core.update import whole_matrices

BOUND, ROWS, STEPS = 1e-5, 72, 10
Numbers = optax.contrib.MuonDimensionNumbers
LAST = Numbers(-2, -1)
MATRICES = {
    "layers": {"u": (8, 16, 24), "d": (6, 24, 16)},  # as many matrices as devices, and not
    "q": (3, 16, 4, 8),
    "experts": (3, 2, 16, 24),
    "square": (40, 40),
    "tall": [(64, 32), (64, 32), (64, 32)],
    "odd": (33, 31),
    "odd_layers": (5, 9, 7),
    "tiny": (4, 4),
}
SHAPES = {**MATRICES, "bias": (6, 24)}
NUMBERS = {
    **jax.tree.map(lambda _: LAST, MATRICES, is_leaf=lambda x: isinstance(x, tuple)),
    "q": Numbers(1, (2, 3)),
    "bias": None,
}
FEW = {"u": (6, 16, 24), "one": (64, 32), "two": (64, 32), "odd": (33, 31), "bias": (240,)}


def is_shape(x):
    return isinstance(x, tuple)


def arrays(shapes, seed):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda shape: random.normal(size=shape).astype(np.float32), shapes, is_leaf=is_shape)


def loss_of(shapes):
    target = arrays(shapes, 2)

    def loss(params, batch, rng):
        half = jax.tree.map(lambda p, t: ((p - t) ** 2).sum() / 2, params, target)
        return jdp.Loss(batch["w"].sum() * sum(jax.tree.leaves(half)), jnp.float32(batch["w"].shape[0]))

    return loss


def batches(steps=STEPS):
    random = np.random.default_rng(3)
    return [{"w": random.uniform(0.5, 1.5, ROWS).astype(np.float32)} for _ in range(steps)]


def by_hand(shapes, tx, steps=STEPS):
    """Parameters and optimizer state after some steps on one device."""
    params, loss = arrays(shapes, 1), loss_of(shapes)

    @jax.jit
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(lambda p: loss(p, batch, None).total / ROWS)(params)
        tx_ = optax.with_extra_args_support(tx)
        updates, opt_state = tx_.update(grads, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for batch in batches(steps):
        params, opt_state = step(params, opt_state, batch)
    return jax.device_get((params, opt_state))


def plan_of(strategy="zero1", devices=8, mesh=None, **settings):
    mesh = mesh if isinstance(mesh, jax.sharding.Mesh) else jdp.make_mesh(devices=jax.devices()[:devices], **mesh or {})
    return jdp.Plan(mesh, strategy, **{"min_shard_size": 24, **settings})


def start(plan, shapes, tx, accumulate=1, wrt=None, **settings):
    state = jdp.init_state(
        lambda rng: jax.tree.map(jnp.asarray, arrays(shapes, 1)), tx, plan, rng=jax.random.key(0), wrt=wrt
    )
    return state, jdp.make_train_step(loss_of(shapes), plan, accumulate=accumulate, **settings)


def run(state, step, given):
    for batch in given:
        state, _ = step(state, batch)
    return state


def assert_same(got, wanted, bound=BOUND):
    for (path, one), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(
            *(np.asarray(x, np.float64) for x in (one, other)), 0, bound, err_msg=jax.tree_util.keystr(path)
        )


def values(state):
    own = state.unpadded()
    return jax.device_get((own.params, own.opt_state))


def assert_kept(state, step):
    report = jdp.verify(step, state, batches(1)[0])
    assert report.kept, report
    assert report.ratio <= 1.02


def assert_sharded(plan, state):
    """Each device has its share of the parameters' momentum, and of nothing large more."""
    count = plan.mesh.shape["data"]
    for place in plan.placements(state):
        whole = int(np.prod(place.own_shape)) * 4
        if place.path.startswith("opt_state") and whole >= 4 * plan.min_shard_size:
            assert place.bytes_per_device <= whole / count * 1.2, place


def assert_trains_as_one_device(shapes, tx, plan, whole, state_bound=BOUND):
    state, step = start(plan, shapes, tx)
    assert set(state.static.whole) == set(whole)
    after, alone = values(run(state, step, batches())), by_hand(shapes, tx)
    assert_same(after[0], alone[0])
    assert_same(after[1], alone[1], state_bound)


# Equality.


@functools.cache
def muon():
    return optax.contrib.muon(1e-2, muon_weight_dimension_numbers=NUMBERS)


@functools.cache
def wanted():
    return by_hand(SHAPES, muon())


WHOLE = {"layers/u", "layers/d", "q", "experts", "square", "tall/0", "tall/1", "tall/2", "odd", "odd_layers"}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("strategy", "devices"), [("ddp", 8), ("zero1", 3), ("zero1", 8), ("zero2", 2), ("zero3", 3), ("zero3", 8)]
)
def test_equals_one_device(strategy, devices, accumulate):
    plan = plan_of(strategy, devices)
    state, step = start(plan, SHAPES, muon(), accumulate)
    alone = {"square", "odd"} if strategy == "ddp" else set()  # every device computes the only one of its kind
    assert set(state.static.whole) == WHOLE - alone
    if strategy != "ddp":
        assert_sharded(plan, state)
    assert_kept(state, step)
    state = run(state, step, batches())
    assert_same(values(state), wanted())


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"strategy": "zero1"}, {"strategy": "zero3", "devices": 3}),
        ({"strategy": "zero3", "devices": 3}, {"strategy": "ddp", "devices": 2}),
        ({"strategy": "zero2", "devices": 2}, {"strategy": "ddp", "devices": 1}),
        ({"strategy": "ddp"}, {"strategy": "zero2", "mesh": {"replica": 2, "data": 4}}),
        ({"strategy": "zero1", "whole_matrices": False}, {"strategy": "zero1", "devices": 4}),
    ],
)
def test_training_goes_on_elsewhere(tmp_path, first, then):
    state, step = start(plan_of(**first), SHAPES, muon())
    state = run(state, step, batches()[:5])
    jdp.save(tmp_path, state)
    plan = plan_of(**then)
    other, step = start(plan, SHAPES, muon())
    placed = jdp.place(state, plan)
    assert placed.static == other.static
    for each in (placed, jdp.restore(tmp_path, other)):
        assert_same(values(run(each, step, batches()[5:])), wanted())


# What a user writes.


def few(**settings):
    numbers = lambda params: jax.tree.map(lambda x: LAST if x.ndim > 1 else None, params)  # noqa: E731
    return optax.contrib.muon(1e-2, muon_weight_dimension_numbers=numbers, **settings)


SETTINGS = {
    "adaptive": {"adaptive": True, "weight_decay": 0.1},
    "aol": {"preconditioning": "aol"},
    "coefficients": {"ns_coeffs": ((3.4, -4.7, 2.0), (3.0, -3.0, 1.2))},
    "dion": {"ns_coeffs": "dion", "preconditioning": "aol"},
    "half": {"mu_dtype": jnp.bfloat16},
    "plain": {"nesterov": False, "consistent_rms": 0.2, "ns_steps": 3},
    "schatten": {"preconditioning": "schatten"},
    "spectral": {"preconditioning": "spectral"},
}


def test_every_setting_of_muon():
    """In one program, each with parameters of its own: scans, conditions in loops, singular values."""
    txs = {name: optax.contrib.muon(1e-3, muon_weight_dimension_numbers=LAST, **kw) for name, kw in SETTINGS.items()}
    tx = optax.multi_transform(txs, {name: name for name in SETTINGS})
    whole = {f"{name}/{leaf}" for name in SETTINGS for leaf in ("w", "odd")}
    shapes = {name: {"w": (3, 16, 8), "odd": (9, 7)} for name in SETTINGS}
    assert_trains_as_one_device(shapes, tx, plan_of(), whole)


def chained():
    """A norm over all parameters before, and norms of each after."""
    schedule = optax.scale_by_schedule(lambda count: 1e-2 / (1 + count))
    return optax.chain(optax.clip_by_global_norm(1.0), few(), optax.scale_by_trust_ratio(), schedule)


def injected():
    make = optax.inject_hyperparams(lambda learning_rate: optax.chain(few(), optax.scale(learning_rate)))
    return optax.contrib.schedule_free(make(learning_rate=optax.linear_schedule(1e-1, 1e-2, 10)), 1e-2)


@pytest.mark.parametrize("make", [chained, injected])
def test_inside_other_transforms(make):
    assert_trains_as_one_device(FEW, make(), plan_of("zero3"), {"u", "one", "two", "odd"})


@pytest.mark.parametrize(
    ("shapes", "whole"), [({"a": {"w": (64, 32), "b": (240,)}, "c": (8, 8, 8)}, "a/w"), ((64, 32), ""), ((33, 31), "")]
)
def test_as_documented(shapes, whole):
    """Matrices have two dimensions; the rest is AdamW's. The parameters may be one array."""
    assert_trains_as_one_device(shapes, optax.contrib.muon(1e-2), plan_of("zero2"), {whole})


def test_frozen_parameters_and_an_average():
    names = ["u", "odd"]
    plan, tx = plan_of("zero3"), jdp.with_ema(few(), 0.9)
    state, step = start(plan, FEW, tx, wrt=names, clip_norm=1.0)
    assert state.static.whole == ("odd", "u")
    alone, step_alone = start(plan_of("ddp", 1), FEW, tx, wrt=names, clip_norm=1.0)
    alone, state = (run(s, each, batches()) for s, each in ((alone, step_alone), (state, step)))
    assert_same(values(state), values(alone))
    assert_same(*(jax.device_get(jdp.ema_params(s).unpadded().params) for s in (state, alone)))


def test_a_gradient_that_is_no_number_changes_nothing():
    state, step = start(plan_of(), FEW, few())
    state = run(state, step, batches(1))
    before, bad = values(state), {"w": np.full(ROWS, np.nan, np.float32)}
    state = run(state, step, [bad])
    assert_same(values(state), before, 0)
    assert int(state.skipped) == 1


# Other meshes and rules.


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("zero3", {"mesh": {"replica": 2, "data": 4}}),
        ("zero1", {"mesh": {"replica": 4, "data": 2}}),
        ("zero2", {"mesh": {"data": 4, "model": 2}, "rules": [("[uo]*", P(None, "model"))]}),
        ("zero3", {"mesh": jax.make_mesh((2, 4), ("replica", "data"), axis_types=(AxisType.Explicit,) * 2)}),
    ],
    ids=["replica=2", "replica=4", "model", "explicit"],
)
def test_on_other_meshes(strategy, settings):
    assert_trains_as_one_device(FEW, few(), plan_of(strategy, **settings), {"u", "one", "two", "odd"})


def test_layers_that_are_sharded_over_the_matrices_send_nothing():
    shapes = {"layers": {"u": (8, 16, 24), "d": (16, 24, 16)}}
    tx, plan = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=LAST), plan_of(rules=[("layers/*", P("data"))])
    state, step = start(plan, shapes, tx)
    report = jdp.verify(step, state, batches(1)[0])
    assert "all-to-all" not in {each.collective.kind for each in report.collectives}
    assert_trains_as_one_device(shapes, tx, plan, {"layers/u", "layers/d"})


def test_replicas_that_train_by_themselves():
    ends = []
    for whole in (True, False):
        plan = plan_of("zero3", mesh={"replica": 2, "data": 4}, whole_matrices=whole)
        state, step = start(plan, FEW, few(), local_steps=jdp.LocalSteps(3, lr=0.7, momentum=0.9))
        assert len(state.static.whole) == 4 * whole
        ends.append(values(run(state, step, batches(4))))
    assert_same(*ends)


def test_part_by_part(monkeypatch):
    """A device takes a stack larger than its bound matrix by matrix."""
    monkeypatch.setattr(whole_matrices, "TOGETHER", 1)
    assert_trains_as_one_device({"u": (24, 8, 16), "odd": (5, 9, 7)}, few(), plan_of(), {"u", "odd"})


# Where it cannot: the same numbers, and a notice.


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (lambda: optax.apply_if_finite(few(), 3), {}, "it computes several parameters at once"),
        (lambda: optax.MultiSteps(few(), 2), {}, "it computes several parameters at once"),
        (few, {"offload": "optimizer"}, "its optimizer state is in host memory"),
        (
            few,
            {"mesh": {"data": 4, "model": 2}, "rules": [("*", P(None, ("model", "data")))]},
            "an axis of the model's shards the dimension that data shards",
        ),
    ],
    ids=["apply_if_finite", "MultiSteps", "offload", "model"],
)
def test_what_cannot_be_whole_is_reported(make, settings, words, capfd, monkeypatch):
    monkeypatch.setattr(notices, "_said", set())
    shapes = {"u": (6, 16, 24), "one": (64, 32)}
    assert_trains_as_one_device(shapes, make(), plan_of(**settings), ())
    said = capfd.readouterr().err
    assert "every device computes it, of gathered matrices" in said
    assert words in said


def test_nothing_is_reported_of_what_mixes_nothing(capfd, monkeypatch):
    monkeypatch.setattr(notices, "_said", set())
    tx = optax.chain(optax.apply_if_finite(optax.novograd(1e-3), 3), optax.clip_by_global_norm(1.0))
    state, _ = start(plan_of(), FEW, tx)
    assert (state.static.whole, len([path for path, _ in state.static.flat if path.startswith("params")])) == ((), 1)
    assert "mixes" not in capfd.readouterr().err


# Other optimizers.


def of_matrices(init_one, update_one, rate):
    """An optimizer of a function of one matrix; layers by `jax.vmap`."""

    def init(params):
        by_layer = jax.tree.map(lambda p: (jax.vmap(init_one) if p.ndim > 2 else init_one)(p), params)
        return {"count": jnp.zeros((), jnp.int32), "own": by_layer}

    def update(grads, state, params=None):
        count, tree = state["count"] + 1, jax.tree.structure(grads)
        one = functools.partial(update_one, count)
        own = zip(tree.flatten_up_to(grads), tree.flatten_up_to(state["own"]), strict=True)
        made = [(jax.vmap(one) if g.ndim > 2 else one)(g, s) for g, s in own]
        updates, states = (tree.unflatten(each) for each in zip(*made, strict=True))
        return jax.tree.map(lambda x: -rate * x, updates), {"count": count, "own": states}

    return optax.GradientTransformation(init, update)


def shampoo():
    def root(x):
        sizes, basis = jnp.linalg.eigh(x)
        return (basis * jnp.maximum(sizes, 1e-4) ** -0.25) @ basis.T

    def init(p):
        return {"m": jnp.zeros_like(p), "left": 1e-4 * jnp.eye(p.shape[0]), "right": 1e-4 * jnp.eye(p.shape[1])}

    def update(count, g, s):
        m = 0.9 * s["m"] + 0.1 * g
        left, right = 0.95 * s["left"] + 0.05 * m @ m.T, 0.95 * s["right"] + 0.05 * m.T @ m
        return root(left) @ m @ root(right), {"m": m, "left": left, "right": right}

    return of_matrices(init, update, 1e-2)


def soap():
    def init(p):
        sides = {"L": jnp.eye(p.shape[0]), "R": jnp.eye(p.shape[1])}
        return {"m": jnp.zeros_like(p), "v": jnp.zeros_like(p), **sides, **{f"Q{k}": x for k, x in sides.items()}}

    def update(count, g, s):
        m = 0.9 * s["m"] + 0.1 * g
        turned, mean = (s["QL"].T @ x @ s["QR"] for x in (g, m))
        v = 0.95 * s["v"] + 0.05 * turned**2
        change = s["QL"] @ (mean / (jnp.sqrt(v / (1 - 0.95**count)) + 1e-8)) @ s["QR"].T
        left, right = 0.95 * s["L"] + 0.05 * g @ g.T, 0.95 * s["R"] + 0.05 * g.T @ g
        fresh = lambda: (jnp.linalg.qr(left @ s["QL"])[0], jnp.linalg.qr(right @ s["QR"])[0])  # noqa: E731
        ql, qr = jax.lax.cond(count % 2 == 0, fresh, lambda: (s["QL"], s["QR"]))
        return change, {"m": m, "v": v, "L": left, "R": right, "QL": ql, "QR": qr}

    return of_matrices(init, update, 1e-3)


@pytest.mark.parametrize(
    ("make", "strategy", "devices"),
    [(shampoo, "zero1", 8), (soap, "zero3", 8), (soap, "zero1", 3), (shampoo, "zero2", 3), (shampoo, "ddp", 8)],
)
def test_preconditioners_of_a_users_own(make, strategy, devices):
    shapes = {"u": (6, 16, 24), "one": (32, 24), "two": (32, 24), "odd": (11, 13)}
    plan, tx = plan_of(strategy, devices), make()
    assert_kept(*start(plan, shapes, tx))
    assert_trains_as_one_device(shapes, tx, plan, shapes)


def test_low_ranks_norms_and_factors():
    """Norms need no matrix whole; means over a dimension do where a parameter is flat, and projections do."""
    txs = {
        "galore": optax.contrib.galore(1e-3, rank=4, update_proj_gap=3),
        "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
        "lamb": optax.lamb(1e-2),
        "lars": optax.lars(1e-2),
        "fromage": optax.fromage(1e-2),
    }
    shapes = {name: {"w": (64, 32), "odd": (33, 31)} for name in txs}
    tx, plan = optax.multi_transform(txs, {name: name for name in txs}), plan_of("zero3")
    whole = {"galore/w", "galore/odd", "adafactor/odd"}
    assert_trains_as_one_device(shapes, tx, plan, whole, state_bound=1e-3)  # the momentum is in a basis of galore's


# One index of a program.


@pytest.mark.parametrize(
    ("function", "place"),
    [
        (lambda x: x @ x.mT, Along(0)),
        (lambda x: x.transpose(1, 0, 2).reshape(4, 15), Along(1, 5)),
        (lambda x: jnp.linalg.norm(x, axis=(1, 2)), Along(0)),
        (lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y + i, x), Along(0)),
        (lambda x: jax.lax.cond(True, lambda y: 2 * y, jnp.ones_like, x), Along(0)),
        (lambda x: jnp.cumsum(x, 0), Mixes),
        (lambda x: x / x.sum(), Mixes),
        (lambda x: jnp.einsum("lmn,kmn->lk", x, x), Mixes),
        (lambda x: jax.lax.scan(lambda c, y: (c + y, y), x[0], x)[1], Mixes),
        (lambda x: x.at[0].set(0.0), Mixes),
    ],
)
def test_where_a_program_has_its_leading_dimension(function, place):
    program = jax.make_jaxpr(function)(jnp.ones((3, 4, 5)))
    if place is Mixes:
        with pytest.raises(Mixes):
            places_of(program, [Along(0)])
    else:
        assert places_of(program, [Along(0)]) == [place]
