"""Partial training (`wrt`): the frozen part has no gradient and no optimizer state, and is sharded all the same.

`test_training_properties` compares partial training with one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from trainings import abstract_step, plan_of

import jdp
from jdp.core.step_settings import StepSettings
from jdp.foresight.traffic.theory import theory

ROWS, WIDTH, RANK = 16, 32, 2


class Model(nnx.Module):
    """A linear layer with a low-rank update beside it (Hu et al. 2021)."""

    def __init__(self, rngs):
        self.base, self.lora = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.LoRA(WIDTH, RANK, WIDTH, rngs=rngs)


def init_module(rng):
    return Model(nnx.Rngs(rng))


def init_tree(rng):
    """A raw pytree: weights in bf16 and a table of integers are frozen, the head is trained."""
    keys = jax.random.split(rng, 3)
    return {
        "body": {
            "w": jax.random.normal(keys[0], (WIDTH, WIDTH), jnp.bfloat16) / 8,
            "table": jax.random.randint(keys[1], (WIDTH, WIDTH), -2, 3, jnp.int8),
        },
        "head": {"kernel": jax.random.normal(keys[2], (WIDTH, 4)) / 8, "bias": jnp.zeros(4)},
    }


def loss_fn(params, batch, rng):
    body, head = params["body"], params["head"]
    x = jnp.tanh(batch["x"] @ (body["w"] + 0.1 * body["table"]))
    return jdp.Loss(jnp.square(x @ head["kernel"] + head["bias"]).sum(), ROWS)


CASES = {
    "LoRA": (init_module, nnx.LoRAParam, ("lora/lora_a", "lora/lora_b")),
    "a callable": (init_module, lambda path, _: path[-1] == "lora_b", ("lora/lora_b",)),
    "a pytree": (init_tree, "head/*", ("head/bias", "head/kernel")),
}
TX = optax.adamw(1e-2, eps=1e-4)
BATCH = {"x": np.ones((ROWS, WIDTH), "f")}


@pytest.mark.parametrize("case", CASES)
def test_frozen_leaves_have_no_optimizer_state(case):
    init, wrt, trained = CASES[case]
    plan = plan_of("zero1", min_shard_size=64)
    state = jdp.abstract_state(init, TX, plan, rng=jax.random.key(0), wrt=wrt)
    places = plan.placements(state)
    params = {place.path.removeprefix("params/"): place for place in places if place.path.startswith("params/")}
    assert {path for path, place in params.items() if place.trained} == {*trained}
    assert {place.path.partition("/mu/")[2] for place in places if "/mu/" in place.path} == {*trained}
    frozen = [p for p in params.values() if not p.trained and len(p.shape) >= 2 and np.prod(p.shape) >= 64]
    assert frozen and all("data" in p.rest for p in frozen)


def test_precision_is_that_of_the_trained_part():
    """Frozen weights may be bf16; trained ones may not."""
    plan = plan_of("zero3", min_shard_size=64)
    step, state = abstract_step(loss_fn, init_tree, TX, plan, wrt="head/*", precision="bf16")
    new, _ = jax.eval_shape(step, state, BATCH)
    assert {str(x.dtype) for x in jax.tree.leaves(new.params)} == {"bfloat16", "int8", "float32"}
    step, state = abstract_step(loss_fn, init_tree, TX, plan, wrt=["head/*", "body/w"])
    with pytest.raises(ValueError, match=r"Precision\.params is fp32, but body/w is bfloat16"):
        jax.eval_shape(step, state, BATCH)


@pytest.mark.parametrize("strategy", ("ddp", "zero1", "zero2", "zero3"))
def test_the_contract_counts_trained_gradients(strategy):
    plan = plan_of(strategy, min_shard_size=64)
    state = jdp.abstract_state(init_module, TX, plan, rng=jax.random.key(0), wrt=nnx.LoRAParam)
    promised = theory(plan, state.params, StepSettings(accumulate=2), static=state.static)
    sizes = {path: np.prod(x.shape) for path, x in jax.tree.leaves_with_path(state.params)}
    psi, trained = sum(sizes.values()), 2 * WIDTH * RANK
    wanted = {
        "ddp": {"all-reduce": 4 * trained},
        "zero1": {"reduce-scatter": 4 * trained, "all-gather": 4 * psi},
        "zero2": {"reduce-scatter": 2 * 4 * trained, "all-gather": 4 * psi},
        "zero3": {"reduce-scatter": 2 * 4 * trained, "all-gather": 2 * 2 * 4 * psi},
    }
    assert promised.payload_bytes == wanted[strategy]


@pytest.mark.parametrize(
    ("init", "wrt", "words"),
    [
        (init_tree, ["head/*", "x"], "must match a parameter; 'x' matches none of body/table, body/w, head/bias, head"),
        (init_tree, (), r"must leave something to train; \(\) matches none of"),
        (init_tree, nnx.LoRAParam, "For a pytree, `wrt` is a path pattern"),
        (
            init_module,
            nnx.BatchStat,
            r"must leave something to train; .*BatchStat.* matches none of base/bias",
        ),
        (init_tree, None, "Every parameter that is trained must be floating point; body/table is int8. Freeze it"),
    ],
)
def test_an_unfit_filter_is_one_clear_error(init, wrt, words):
    with pytest.raises(ValueError, match=words):
        jdp.abstract_state(init, TX, plan_of("zero1"), rng=jax.random.key(0), wrt=wrt)
