"""Partial training (`wrt`): the frozen part has no gradient and no optimizer state, and is sharded all the same.

`test_training_properties` compares partial training with one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from trainings import plan_of

import jdp

WIDTH, RANK = 32, 2


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


CASES = {
    "LoRA": (init_module, nnx.LoRAParam, ("lora/lora_a", "lora/lora_b")),
    "a callable": (init_module, lambda path, _: path[-1] == "lora_b", ("lora/lora_b",)),
    "a pytree": (init_tree, "head/*", ("head/bias", "head/kernel")),
}
TX = optax.adamw(1e-2, eps=1e-4)


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


@pytest.mark.parametrize(
    ("init", "wrt", "words"),
    [
        (init_tree, ["head/*", "x"], "must match a parameter; 'x' matches none of body/table, body/w, head/bias, head"),
        (init_tree, (), r"must leave something to train; \(\) matches none of"),
        (init_tree, nnx.LoRAParam, "For a pytree, `wrt` is a path pattern"),
        (init_module, nnx.BatchStat, r"must leave something to train; .*BatchStat.* matches none of base/bias"),
        (init_tree, None, "Every parameter that is trained must be floating point; body/table is int8. Freeze it"),
    ],
)
def test_an_unfit_filter_is_one_clear_error(init, wrt, words):
    with pytest.raises(ValueError, match=words):
        jdp.abstract_state(init, TX, plan_of("zero1"), rng=jax.random.key(0), wrt=wrt)
