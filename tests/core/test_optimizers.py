"""Any optax optimizer: its state lies where the parameters lie, stays there, and leads to one device's weights.

The whole list of optax's aliases runs in one program: every alias has a kernel and a bias of its own and
`multi_transform` hands each its part. All activations are positive and the targets far below them, so no gradient
cancels: what sees only its sign, or divides by it, is not at the mercy of the last bit. float32 sums over eight devices
run in another order, some 1e-7 of each gradient; the bound leaves room for what a few steps of dividing make of it.
"""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdp

ROWS, FEATURES, OUT = 16, 32, 16
ALIASES = sorted(
    name
    for name, value in vars(optax).items()
    if inspect.isfunction(value) and value.__module__ == "optax._src.alias" and not name.startswith("_")
)
SETTINGS = {
    "adafactor": {"min_dim_size_to_factor": 8},
    "lbfgs": {"linesearch": None},
    "noisy_sgd": {"key": jax.random.key(1)},
    "optimistic_adam_v2": {"alpha": 0.5},
    "sgd": {"momentum": 0.9},
}
RUNS = {"one device": ("ddp", 1), "ddp": ("ddp", 8), "zero1": ("zero1", 8), "zero3": ("zero3", 8)}


def alias(name):
    make = getattr(optax, name)
    rate = "max_learning_rate" if name == "polyak_sgd" else "learning_rate"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # optimistic_adam, as long as optax has it
        return make(**{rate: 1e-3}, **SETTINGS.get(name, {}))


def init_one(rng):
    return {"kernel": jax.random.uniform(rng, (FEATURES, OUT)), "bias": jnp.ones(OUT)}


def init_all(rng):
    return {name: init_one(jax.random.fold_in(rng, i)) for i, name in enumerate(ALIASES)}


def regression(params, batch):
    """[rows]: how far each prediction is from targets below all of them, squared."""
    return ((batch["x"] @ params["kernel"] + params["bias"] - batch["y"]) ** 2).mean(axis=1)


def loss_all(params, batch, rng):
    return jdp.Loss(sum(regression(part, batch).sum() for part in params.values()), jnp.float32(batch["x"].shape[0]))


def loss_one(params, batch, rng):
    return jdp.Loss(regression(params, batch).sum(), jnp.float32(batch["x"].shape[0]))


def batches(steps=3):
    random = np.random.default_rng(0)
    for _ in range(steps):
        x, y = random.uniform(0.5, 1, (ROWS, FEATURES)), random.uniform(-30, -20, (ROWS, OUT))
        yield {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def plan_of(run, **settings):
    strategy, devices = RUNS[run]
    return jdp.Plan(jdp.make_mesh(devices=jax.devices()[:devices]), strategy, min_shard_size=64, **settings)


def laid(state):
    """Of every leaf by path: its sharding, and the bytes that one device holds of it."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            leaf.sharding,
            (jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
            .addressable_shards[0]
            .data.nbytes,
        )
        for path, leaf in jax.tree.leaves_with_path(state)
    }


def train(plan, tx, init, loss_fn, steps=3, wrt=None, **settings):
    """How the state lay before the first step and after each; the first parameters, the last state."""
    state = jdp.init_state(init, tx, plan, rng=jax.random.key(0), wrt=wrt)
    step = jdp.make_train_step(loss_fn, plan, **settings)
    first, lay = jax.device_get(state.params), [laid(state)]
    for batch in batches(steps):
        state, _ = step(state, batch)
        lay.append(laid(state))
    return lay, first, state


def assert_laid_as_planned(plan, lay, state, part=""):
    places = [place for place in plan.placements(state) if part in place.path]
    assert places
    for place in places:
        wanted = NamedSharding(plan.mesh, place.rest)
        for sharding, size in (found[place.path] for found in lay):
            assert sharding.is_equivalent_to(wanted, len(place.shape)), place.path
            assert size == place.bytes_per_device, place.path
    return places


def assert_same(got, wanted, rtol=1e-5, atol=1e-6):
    for (path, one), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


BEYOND_ELEMENTS = {"adafactor", "fromage", "lamb", "lars", "lbfgs", "noisy_sgd", "novograd", "polyak_sgd", "sm3"}
"""Aliases that look at more of a parameter than an element, at the loss, or keep something of another shape."""


@functools.cache
def run_all(run):
    names = [name for name in ALIASES if run != "zero1" or name in BEYOND_ELEMENTS]
    tx = optax.multi_transform({name: alias(name) for name in names}, {name: name for name in names})
    plan = plan_of(run)
    return plan, train(plan, tx, lambda rng: {name: init_all(rng)[name] for name in names}, loss_all)


RUNS_OF_ALL = [
    pytest.param(name, run, marks=[pytest.mark.slow] if run == "ddp" else [])
    for name in ALIASES
    for run in ("ddp", "zero1", "zero3")
    if run != "zero1" or name in BEYOND_ELEMENTS
]


@pytest.mark.parametrize(("name", "run"), RUNS_OF_ALL)
def test_every_alias_is_laid_as_planned_and_trains_as_on_one_device(name, run):
    """Under ddp each device has what one device has, and computes it: that is `slow`. zero1 lays a state as zero3 does
    (below, for all of them); what an update of elements makes of it differs from zero3 in nothing."""
    plan, (lay, first, state) = run_all(run)
    for place in assert_laid_as_planned(plan, lay, state, f"/{name}/"):
        if place.shape in ((FEATURES, OUT), (OUT,)):  # sharded where the parameter is
            assert place.rest == (P("data") if run != "ddp" and place.shape == (FEATURES, OUT) else P()), place
    _, (_, _, alone) = run_all("one device")
    last, wanted = (jax.device_get(s.params[name]) for s in (state, alone))
    assert_same(last, wanted)
    assert all(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (first[name], last)), strict=True))


def test_every_alias_is_run():
    """A new one in optax comes into the list by itself; this is to see that the list is one."""
    assert {"adam", "adafactor", "lamb", "lars", "lbfgs", "lion", "sm3", "sgd"} <= set(ALIASES)
    assert len(ALIASES) >= 29


# What belongs to which parameter.


def shapes_of(init, tx, plan, wrt=None):
    return jdp.abstract_state(init, tx, plan, rng=jax.random.key(0), wrt=wrt)


def placed(plan, state):
    return {p.path.removeprefix("opt_state/"): p for p in plan.placements(state) if p.path.startswith("opt_state/")}


class Blocks:
    """A second-order method's preconditioners: one [k, k] a dimension of each parameter (Gupta et al. 2018)."""

    @staticmethod
    def init(params):
        return jax.tree.map(lambda p: [jnp.eye(k) for k in p.shape], params)

    @staticmethod
    def update(updates, state, params=None):
        return jax.tree.map(lambda g: -1e-4 * g, updates), state


def stacked(rng):
    return {"w": jnp.zeros((4, FEATURES, OUT)), "fast": jnp.zeros((FEATURES, FEATURES))}


DERIVED = {
    "adafactor, a dimension gone": (
        lambda: optax.adafactor(1e-3, min_dim_size_to_factor=8),
        {
            "0/v_row/w": (
                (4, OUT),
                P(None, "data"),
                "sharded on dimension 1: 16 over data=8 (dimensions [0, 2] of params/w)",
            ),
            "0/v_col/w": ((4, FEATURES), P(None, "data"), "dimensions [0, 1] of params/w"),
            "0/v_row/fast": ((FEATURES,), P("data"), "dimensions [0] of params/fast"),  # of two alike, the sharded one
            "0/v/w": ((1,), P(), "replicated: 1 elements, fewer than min_shard_size=64 "),
        },
    ),
    "sm3, one dimension each": (
        lambda: optax.sm3(1e-3),
        {
            "0/mu/w/0": ((4,), P(), "replicated: 4 elements"),
            "0/mu/w/1": ((FEATURES,), P("data"), "dimensions [1] of params/w"),
            "0/nu/w": ((4, FEATURES, OUT), P(None, "data"), "mirrors params/w"),
        },
    ),
    "lbfgs, a history in front": (
        lambda: optax.lbfgs(1e-3, memory_size=3, linesearch=None),
        {
            "0/diff_params_memory/w": (
                (3, 4, FEATURES, OUT),
                P(None, None, "data"),
                "dimensions [0, 1, 2] of params/w",
            ),
            "0/params/w": ((4, FEATURES, OUT), P(None, "data"), "mirrors params/w"),
            "0/weights_memory": ((3,), P(), "replicated: 3 elements, fewer than min_shard_size=64 (it belongs to no "),
        },
    ),
    "second-order blocks": (
        lambda: optax.GradientTransformation(Blocks.init, Blocks.update),
        {
            "w/1": (
                (FEATURES, FEATURES),
                P("data"),
                "sharded on dimension 0: 32 over data=8 (its own shape: [4, 32, 16] ",
            ),
            "w/0": ((4, 4), P(), "replicated: 16 elements, fewer than min_shard_size=64 (its own shape: [4, 32, 16] "),
        },
    ),
}


@pytest.mark.parametrize("name", DERIVED)
def test_a_leaf_that_is_made_from_a_parameter_gets_what_fits_it_and_says_so(name):
    make, wanted = DERIVED[name]
    plan = plan_of("zero1")
    places = placed(plan, shapes_of(stacked, make(), plan))
    for path, (shape, rest, reason) in wanted.items():
        assert (places[path].shape, places[path].rest) == (shape, rest), path
        assert places[path].reason.startswith(reason), path
    ddp = plan_of("ddp")
    assert {place.rest for place in placed(ddp, shapes_of(stacked, make(), ddp)).values()} == {P()}


# Wrappers, in steps.


def init_lookahead(rng):
    return optax.LookaheadParams.init_synced(init_one(rng))


def loss_lookahead(params, batch, rng):
    return loss_one(params.fast, batch, rng)


WRAPPED = {
    "lookahead": (lambda: optax.lookahead(optax.adam(1e-3), 2, 0.5), init_lookahead, loss_lookahead, 2),
    "MultiSteps": (lambda: optax.MultiSteps(optax.adam(1e-3), 2), init_one, loss_one, 3),
    "chain of wrappers": (
        lambda: optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.masked(optax.inject_hyperparams(optax.lamb)(learning_rate=1e-3), {"kernel": True, "bias": False}),
            optax.apply_if_finite(optax.partition({"a": optax.adam(1e-3)}, {"kernel": "a", "bias": "a"}), 3),
            optax.add_decayed_weights(1e-4),
        ),
        init_one,
        loss_one,
        4,
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_keep_their_state_sharded_and_train_as_on_one_device(name):
    make, init, loss_fn, copies = WRAPPED[name]
    plan = plan_of("zero3")
    lay, _, state = train(plan, make(), init, loss_fn)
    places = assert_laid_as_planned(plan, lay, state, "opt_state/")
    sharded = [place for place in places if place.rest == P("data")]
    assert len(sharded) == copies
    alone = train(plan_of("one device"), make(), init, loss_fn)[2]
    assert_same(jax.device_get(state.params), jax.device_get(alone.params))


# What a step cannot carry.


def test_an_optimizer_that_asks_for_more_than_a_step_has_is_refused_before_it_compiles():
    with pytest.raises(ValueError, match=r"this one's update also needs grad, value_fn\. Leave out .*linesearch=None"):
        shapes_of(init_one, optax.lbfgs(1e-3), plan_of("zero1"))


def transformation(init, update=lambda g, s, p=None: (g, s)):
    return optax.GradientTransformation(init, update)


def test_a_leaf_that_is_no_array_is_named():
    with pytest.raises(ValueError, match=r"state holds arrays only; opt_state/mode is 'fast'\. Keep settings"):
        shapes_of(init_one, transformation(lambda params: {"mode": "fast"}), plan_of("zero1"))


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (lambda g, s, p=None: (g, {"m": s["m"].astype(jnp.bfloat16)}), r"float32\[3\] before .* bfloat16\[3\] after"),
        (lambda g, s, p=None: (g, {"m": jnp.zeros(4)}), r"float32\[3\] before an update and float32\[4\] after"),
        (lambda g, s, p=None: (g, {}), r"float32\[3\] before an update and nothing after"),
    ],
)
def test_a_state_that_changes_between_steps_is_named(update, words):
    with pytest.raises(ValueError, match=rf"keeps its structure, shapes and dtypes .* opt_state/m is {words}"):
        shapes_of(init_one, transformation(lambda params: {"m": jnp.zeros(3)}, update), plan_of("zero1"))
