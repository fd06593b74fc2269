"""Optimizers of `optax.contrib` lead to one device's weights, on leaves that divide by the devices and on others.

As in `test_optimizers.py` all run in one program. The list is read from the module: a new optimizer comes in by itself.
"""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from judged import judged
from optax import contrib
from test_optimizers import (
    ALIASES,
    ROWS,
    alias,
    assert_laid_as_planned,
    assert_same,
    init_one,
    plan_of,
    regression,
    train,
)

import jdp
from jdp.core.update.optimizer_checks import check_update, products

NAMES = sorted(
    name
    for name, value in vars(contrib).items()
    if inspect.isfunction(value) and not name.startswith("scale_by_") and name != "schedule_free_eval_params"
)
SETTINGS = {  # estimates of a rate begin at 1e-6, with which three steps change nothing
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
REFUSED = {
    "differentially_private_aggregate": "expects `grads` to have a batch dimension",
    "dpsgd": "expects `grads` to have a batch dimension",
    "hutchinson_estimator_diag_hessian": "obj_fn must be provided",
    "sophia": "obj_fn must be provided",
}
"""Optimizers that need a gradient of each row, or the loss function: the reason, in optax's words."""
TRAINED = [name for name in NAMES if name not in REFUSED]


def made(name):
    settings = dict(SETTINGS.get(name, {}))
    rate = inspect.signature(getattr(contrib, name)).parameters.get("learning_rate")
    if rate is not None and rate.default is inspect.Parameter.empty:
        settings.setdefault("learning_rate", 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # dpsgd hands its seed on
        tx = getattr(contrib, name)(**settings)
    if name in ("normalize", "reduce_on_plateau"):  # of an update, and no optimizers by themselves
        return optax.chain(tx, optax.sgd(0.1 if name == "normalize" else 1e-3))
    if name == "sam":  # takes no `value`, which is handed to all of a program or to none
        return optax.GradientTransformation(tx.init, lambda g, s, p=None: tx.update(g, s, p))
    return tx


def loss_all(params, batch, rng):
    odd = {key: jnp.pad(batch[key], ((0, 0), (0, 1)), mode="edge") for key in ("x", "y")}
    total = 0.0
    for part in params.values():
        total += regression(part, batch).sum()
        if "odd" in part:
            total += regression({"kernel": part["odd"], "bias": 0.0}, odd).sum()
    return jdp.Loss(total, jnp.float32(batch["x"].shape[0]))


@functools.cache
def run_all(run, init):
    tx = optax.multi_transform({name: made(name) for name in TRAINED}, {name: name for name in TRAINED})
    plan = plan_of(run)
    return plan, train(plan, tx, lambda rng: {name: init(rng) for name in TRAINED}, loss_all)


def assert_as_on_one_device(name, run, init):
    plan, (lay, _, state) = run_all(run, init)
    assert_laid_as_planned(plan, lay, state, f"/{name}/")
    _, (_, first, alone) = run_all("one device", init)
    got, wanted = state.params[name], alone.params[name]
    assert_same(*jax.device_get((got, wanted)))
    assert all(np.abs(a - b).max() > 1e-4 for a, b in zip(*map(jax.tree.leaves, (first[name], wanted)), strict=True))
    return state


@pytest.mark.parametrize("run", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("name", TRAINED)
def test_every_optimizer_is_laid_as_planned_and_trains_as_on_one_device(name, run):
    assert_as_on_one_device(name, run, init_one)


def test_every_optimizer_is_run():
    assert {"acprop", "galore", "madgrad", "muon", "prodigy", "sam", "schedule_free_sgd"} <= set(TRAINED)
    assert len(NAMES) >= 26


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_needs_more_is_refused_with_the_reason(name):
    with pytest.raises(ValueError, match=rf"A step hands an optimizer .* raised ValueError: .*{REFUSED[name]}"):
        jdp.abstract_state(init_one, made(name), plan_of("zero3"), rng=jax.random.key(0))


SHAPES = {"wide": (64, 128), "tall": (128, 64), "bias": (128,)}  # sharded on either dimension
ALL = {f"optax.{name}": functools.partial(alias, name) for name in ALIASES}
ALL |= {f"contrib.{name}": functools.partial(made, name) for name in TRAINED}
PRODUCTS = {"optax.lbfgs"} | {
    f"contrib.{name}" for name in ("dadapt_adamw", "galore", "mechanize", "momo", "momo_adam", "muon", "prodigy")
}
"""Optimizers of matrix or inner products, whose cost is reported."""


def perceptrons(params, batch, rng):
    total = sum((((batch["x"] @ p["wide"] + p["bias"]) @ p["tall"]) ** 2).sum() for p in params.values())
    return jdp.Loss(total, jnp.float32(batch["x"].shape[0]))


@pytest.mark.parametrize("name", ALL)
def test_products_are_those_of_a_list(name):
    params, tx = {key: jax.ShapeDtypeStruct(shape, "float32") for key, shape in SHAPES.items()}, ALL[name]()
    program = check_update(tx, params, jax.eval_shape(tx.init, params))
    assert (64 * 128 in products(program)) == (name in PRODUCTS)


@pytest.mark.parametrize(
    "names", [["optax.adafactor", "optax.lamb"], sorted(ALL.keys() - PRODUCTS)], ids=["two", "all"]
)
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_without_products_no_optimizer_sends_more_than_its_row(strategy, names):
    """Of norms and factors XLA sends a few numbers."""
    plan = jdp.Plan(jdp.make_mesh(), strategy, min_shard_size=32)
    tx = optax.multi_transform({name: ALL[name]() for name in names}, {name: name for name in names})
    init = lambda rng: {name: {key: jnp.ones(shape) for key, shape in SHAPES.items()} for name in names}  # noqa: E731
    state = jdp.abstract_state(init, tx, plan, rng=jax.random.key(0))
    step = jdp.make_train_step(perceptrons, plan, partitioning="manual", check_loss=False)
    report = judged(step, state, {"x": jax.ShapeDtypeStruct((ROWS, 64), "float32")})
    assert report.kept, report
