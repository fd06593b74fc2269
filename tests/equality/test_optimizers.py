"""Any optax optimizer: its state lies where the parameters lie, stays there, and leads to one device's weights.

Optax's aliases run in two programs, and those of `optax.contrib` in another: every optimizer has a kernel and a bias of
its own and `multi_transform` hands each its part. The lists are read from the modules: a new optimizer comes in by
itself. All activations are positive and the targets far below them, so no gradient cancels and its sign is certain.
float32 sums over eight devices run in another order, some 1e-7 of each gradient; steps that divide by it enlarge this.
"""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from judged import judged
from optax import contrib
from trainings import abstract_step, assert_close
from trainings import plan_of as _plan_of

import jdp
from jdp.base.tree_paths import path_of
from jdp.core.update.optimizer import check_update, products

ROWS, FEATURES, OUT = 16, 32, 16


def functions_of(module, is_one):
    return [name for name, value in sorted(vars(module).items()) if inspect.isfunction(value) and is_one(value)]


REFUSED = {
    "differentially_private_aggregate": "expects `grads` to have a batch dimension",
    "dpsgd": "expects `grads` to have a batch dimension",
    "hutchinson_estimator_diag_hessian": "obj_fn must be provided",
    "sophia": "obj_fn must be provided",
}
"""Optimizers that need a gradient of each row, or the loss function: the reason, in optax's words."""
NO_OPTIMIZERS = {"schedule_free_eval_params", *REFUSED}
ALIASES = functions_of(optax, lambda f: f.__module__ == "optax._src.alias" and f.__name__[0] != "_")
CONTRIB = [name for name in functions_of(contrib, lambda f: f.__name__[:9] != "scale_by_") if name not in NO_OPTIMIZERS]
QUICK = ["adam", "adafactor", "lamb", "lbfgs", "sm3"]
GROUPS = {"quick": QUICK, "optax": [name for name in ALIASES if name not in QUICK], "contrib": CONTRIB}
SETTINGS = {  # estimates of a rate begin at 1e-6, with which three steps change nothing
    "adafactor": {"min_dim_size_to_factor": 8},
    "lbfgs": {"linesearch": None},
    "noisy_sgd": {"key": jax.random.key(1)},
    "optimistic_adam_v2": {"alpha": 0.5},
    "polyak_sgd": {"max_learning_rate": 1e-3},
    "sgd": {"momentum": 0.9},
    "dadapt_adamw": {"estim_lr0": 1e-2},
    "differentially_private_aggregate": {"l2_norm_clip": 1.0, "noise_multiplier": 0.0, "key": jax.random.key(0)},
    "dog": {"init_step": ("heuristic", 1e-3)},
    "dpsgd": {"l2_norm_clip": 1.0, "noise_multiplier": 0.0, "seed": 0},
    "galore": {"rank": 1},  # more than the gradient has; see matrix_optimizers.md
    "mechanize": {"base_optimizer": optax.adam(1e-2), "s_init": 0.1},
    "momo": {"learning_rate": 1e-2},
    "prodigy": {"estim_lr0": 1e-2},
    "sam": {"optimizer": optax.adam(1e-3), "adv_optimizer": optax.chain(contrib.normalize(), optax.sgd(0.1))},
    "schedule_free_sgd": {"learning_rate": 1e-4},
    "schedule_free": {"base_optimizer": optax.adam(1e-3)},
    "split_real_and_imaginary": {"inner": optax.adam(1e-3)},
}
RUNS = {"one device": ("ddp", 1), "zero1": ("zero1", 8), "zero3": ("zero3", 8), "ddp": ("ddp", 8)}


def optimizer(name):
    make = getattr(contrib, name, None) or getattr(optax, name)
    settings = dict(SETTINGS.get(name, {}))
    rate = inspect.signature(make).parameters.get("learning_rate")
    if rate is not None and rate.default in (inspect.Parameter.empty, None):
        settings.setdefault("learning_rate", 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # optimistic_adam; dpsgd hands its seed on
        tx = make(**settings)
    if name in ("normalize", "reduce_on_plateau"):  # of an update, and no optimizers by themselves
        return optax.chain(tx, optax.sgd(0.1 if name == "normalize" else 1e-3))
    if name == "sam":  # takes no `value`, which is handed to all of a program or to none
        return optax.GradientTransformation(tx.init, lambda g, s, p=None: tx.update(g, s, p))
    return tx


def together(names):
    return optax.multi_transform({name: optimizer(name) for name in names}, {name: name for name in names})


def init_one(rng):
    return {"kernel": jax.random.uniform(rng, (FEATURES, OUT)), "bias": jnp.ones(OUT)}


def loss_all(params, batch, rng):
    """The predictions' squared distances from targets below all of them."""
    errors = [batch["x"] @ part["kernel"] + part["bias"] - batch["y"] for part in params.values()]
    return jdp.Loss(sum((error**2).mean(axis=1).sum() for error in errors), jnp.float32(batch["x"].shape[0]))


def batches():
    random = np.random.default_rng(0)
    for _ in range(3):
        x, y = random.uniform(0.5, 1, (ROWS, FEATURES)), random.uniform(-30, -20, (ROWS, OUT))
        yield {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def plan_of(run):
    return _plan_of(*RUNS[run], min_shard_size=64)


def laid(state):
    """Of every leaf by path: its sharding, and the bytes that one device holds of it."""
    placed = {}
    for path, leaf in jax.tree.leaves_with_path(state):
        array = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        placed[path_of(path)] = (leaf.sharding, array.addressable_shards[0].data.nbytes)
    return placed


@functools.cache
def run_all(group, run):
    """How the state lay before the first step and after each; the first parameters, the last state."""
    names, plan = GROUPS[group], plan_of(run)
    init = lambda rng: {name: init_one(jax.random.fold_in(rng, i)) for i, name in enumerate(names)}  # noqa: E731
    state = jdp.init_state(init, together(names), plan, rng=jax.random.key(0))
    step = jdp.make_train_step(loss_all, plan, check_loss=False)
    first, lay = jax.device_get(state.params), [laid(state)]
    for batch in batches():
        state, _ = step(state, batch)
        lay.append(laid(state))
    return lay, first, state


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in GROUPS.items() for name in names])
@pytest.mark.default_ids("quick-*")
def test_every_optimizer_trains_as_on_one_device(group, name):
    """Under zero3: zero1 lays a state as zero3 does (below, for all of them)."""
    lay, first, state = run_all(group, "zero3")
    plan = plan_of("zero3")
    places = [place for place in plan.placements(state) if f"/{name}/" in place.path]
    assert places
    for place in places:
        wanted = NamedSharding(plan.mesh, place.rest)
        for sharding, size in (found[place.path] for found in lay):
            assert sharding.is_equivalent_to(wanted, len(place.shape)), place.path
            assert size == place.bytes_per_device, place.path
        if place.shape in ((FEATURES, OUT), (OUT,)):  # sharded where the parameter is
            assert place.rest == (P("data") if place.shape == (FEATURES, OUT) else P()), place
    last, wanted = (jax.device_get(run_all(group, run)[2].params[name]) for run in ("zero3", "one device"))
    assert_close(last, wanted)
    assert all(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (first[name], last)), strict=True))


def test_every_optimizer_is_run():
    assert {"lars", "lion", "sgd", *QUICK} <= set(ALIASES) and {"galore", "muon", "sam"} <= set(CONTRIB)


# What is sent beside the strategy's row: nothing, but for matrix and inner products, which are reported.

SHAPES = {"wide": (64, 128), "tall": (128, 64), "bias": (128,)}  # sharded on either dimension
PRODUCTS = {"lbfgs", "dadapt_adamw", "galore", "mechanize", "momo", "momo_adam", "muon", "prodigy"}
"""Optimizers of matrix or inner products, whose cost is reported."""


@pytest.mark.parametrize("name", [*ALIASES, *CONTRIB])
def test_products_are_those_of_a_list(name):
    params, tx = {key: jax.ShapeDtypeStruct(shape, "float32") for key, shape in SHAPES.items()}, optimizer(name)
    program = check_update(tx, params, jax.eval_shape(tx.init, params))
    assert (64 * 128 in products(program)) == (name in PRODUCTS)


def perceptrons(params, batch, rng):
    total = sum((((batch["x"] @ p["wide"] + p["bias"]) @ p["tall"]) ** 2).sum() for p in params.values())
    return jdp.Loss(total, jnp.float32(batch["x"].shape[0]))


def test_norms_and_factors_send_their_row():
    """XLA sends a few numbers for them, and nothing for optimizers of single elements."""
    names = ("adafactor", "lamb")
    plan = jdp.Plan(jdp.make_mesh(), "zero1", min_shard_size=32)
    init = lambda rng: {name: {key: jnp.ones(shape) for key, shape in SHAPES.items()} for name in names}  # noqa: E731
    step, state = abstract_step(perceptrons, init, together(names), plan, partitioning="manual")
    report = judged(step, state, {"x": jax.ShapeDtypeStruct((ROWS, 64), "float32")})
    assert report.kept, report


# What belongs to which parameter.


def shapes_of(init, tx, plan):
    return jdp.abstract_state(init, tx, plan, rng=jax.random.key(0))


def placed(plan, tx):
    places = plan.placements(shapes_of(stacked, tx, plan))
    return {p.path.removeprefix("opt_state/"): p for p in places if p.path.startswith("opt_state/")}


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
            "0/v_row/w": ((4, OUT), P(None, "data"), "sharded on dimension 1: 16 over data=8 (dimensions [0, 2] of"),
            "0/v_row/fast": ((FEATURES,), P("data"), "dimensions [0] of params/fast"),  # of two alike, the sharded one
            "0/v/w": ((1,), P(), "replicated: 1 elements, fewer than min_shard_size=64 "),
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
            "0/weights_memory": ((3,), P(), "replicated: 3 elements, fewer than min_shard_size=64 (it belongs to no "),
        },
    ),
    "second-order blocks": (
        lambda: optax.GradientTransformation(Blocks.init, Blocks.update),
        {
            "w/1": ((FEATURES, FEATURES), P("data"), "sharded on dimension 0: 32 over data=8 (its own shape: [4, 32"),
            "w/0": ((4, 4), P(), "replicated: 16 elements, fewer than min_shard_size=64 (its own shape: [4, 32, 16] "),
        },
    ),
}


@pytest.mark.parametrize("name", DERIVED)
def test_derived_leaves_are_placed_with_a_reason(name):
    make, wanted = DERIVED[name]
    places = placed(plan_of("zero1"), make())
    for path, (shape, rest, reason) in wanted.items():
        assert (places[path].shape, places[path].rest) == (shape, rest), path
        assert places[path].reason.startswith(reason), path
    assert {place.rest for place in placed(plan_of("ddp"), make()).values()} == {P()}


def of_state(state, update=lambda state: state):
    """An optimizer with this state, and what an update makes of it."""
    return optax.GradientTransformation(lambda params: state, lambda grads, state, params=None: (grads, update(state)))


NARROWED = of_state({"m": jnp.zeros(3)}, lambda state: {"m": state["m"].astype(jnp.bfloat16)})
CHANGES = r"keeps its structure, shapes and dtypes .* opt_state/m is float32\[3\] before an update and "
NOT_CARRIED = {
    **{key: (optimizer(key), f"A step gives an optimizer .* raised ValueError: .*{REFUSED[key]}") for key in REFUSED},
    "labels": (optax.partition({"a": optax.sgd(1)}, nnx.State({"kernel": "a"})), "ValueError: .*, not nnx.State"),
    "a line search": (optax.lbfgs(1e-3), r"also needs grad, value_fn\. Leave out its cause, .*linesearch=None"),
    "text": (of_state({"mode": "fast"}), r"state holds arrays only; opt_state/mode is 'fast'\. Keep settings"),
    "a dtype that changes": (NARROWED, CHANGES + r"bfloat16\[3\] after"),
    "a leaf that goes": (of_state({"m": jnp.zeros(3)}, lambda state: {}), CHANGES + "nothing after"),
}


@pytest.mark.parametrize("name", NOT_CARRIED)
def test_optimizers_beyond_a_step_are_refused(name):
    tx, words = NOT_CARRIED[name]
    with pytest.raises(ValueError, match=words):
        shapes_of(init_one, tx, plan_of("zero3"))
