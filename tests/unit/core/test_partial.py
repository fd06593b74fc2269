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

ROWS, WIDTH, RANK, LAYERS = 16, 32, 2, 3
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


class Block(nnx.Module):
    """A linear layer with a low-rank update beside it (Hu et al. 2021): y = x W + x A B."""

    def __init__(self, *, rngs):
        self.base = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.lora = nnx.LoRA(WIDTH, RANK, WIDTH, b_initializer=nnx.initializers.normal(0.1), rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.base(x) + self.lora(x))


class Model(nnx.Module):
    def __init__(self, *, rngs):
        self.blocks = nnx.vmap(lambda rngs: Block(rngs=rngs), in_axes=0, out_axes=0)(rngs.split(LAYERS))
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(jdp.scan_layers(lambda block, x: block(x), self.blocks, x, remat="full"))


def init_module(rng):
    return Model(rngs=nnx.Rngs(rng))


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


def apply_tree(params, x):
    body = params["body"]
    x = jnp.tanh(x @ (body["w"] + 0.1 * body["table"]))
    return x @ params["head"]["kernel"] + params["head"]["bias"]


def loss_fn(model, batch, rng):
    y = apply_tree(model, batch["x"]) if isinstance(model, dict) else model(batch["x"])
    return jdp.Loss((batch["weight"] * ((y - batch["y"]) ** 2).sum(1)).sum(), batch["weight"].sum())


CASES = {
    "LoRA": (init_module, nnx.LoRAParam, ("blocks/lora/lora_a", "blocks/lora/lora_b")),
    "a callable": (init_module, lambda path, _: path[-1] == "lora_b", ("blocks/lora/lora_b",)),
    "a pytree": (init_tree, "head/*", ("head/bias", "head/kernel")),
}
TX = optax.adamw(1e-2, eps=1e-4)
BATCH = {"x": np.ones((ROWS, WIDTH), "f"), "y": np.ones((ROWS, 4), "f"), "weight": np.ones(ROWS, "f")}


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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_contract_counts_trained_gradients(strategy):
    plan = plan_of(strategy, min_shard_size=64)
    state = jdp.abstract_state(init_module, TX, plan, rng=jax.random.key(0), wrt=nnx.LoRAParam)
    promised = theory(plan, state.params, StepSettings(accumulate=2), static=state.static)
    sizes = {path: np.prod(x.shape) for path, x in jax.tree.leaves_with_path(state.params)}
    psi, trained = sum(sizes.values()), 2 * LAYERS * WIDTH * RANK
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
        (init_module, nnx.BatchStat, r"must leave something to train; .*BatchStat.* matches none of .* and 1 more"),
        (init_tree, None, "Every parameter that is trained must be floating point; body/table is int8. Freeze it"),
    ],
)
def test_an_unfit_filter_is_one_clear_error(init, wrt, words):
    with pytest.raises(ValueError, match=words):
        jdp.abstract_state(init, TX, plan_of("zero1"), rng=jax.random.key(0), wrt=wrt)
