"""A call that cannot mean anything is one ValueError, at once: the rule, the value given, the fix."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import jdp
from jdp.base.errors import UserError
from jdp.export import gpt2_names
from jdp.models import ResNetConfig

TX = optax.sgd(0.1)
KEY = jax.random.key(0)


def mesh():
    return jdp.make_mesh(data=4, model=2)


def plan(**settings):
    return jdp.Plan(mesh(), "zero3", **settings)


def params(rng):
    return {"w": jnp.ones((8, 4)), "lora_a": jnp.ones(2)}


def state(init=params, tx=TX, rng=KEY, wrt=None):
    return jdp.abstract_state(init, tx, plan(), rng=rng, wrt=wrt)


def linear(rng):
    return nnx.Linear(2, 2, rngs=nnx.Rngs(rng))


def step(**settings):
    return jdp.make_train_step(lambda params, batch, rng: jnp.zeros(()), plan(), **settings)


def keywords(p, batch, *, rng):
    return 0.0


class OfRngs(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(rngs.params())


PAIR = r"A rule is a pair of a path pattern and a spec, as in rules=\[.*\]; given "
TX_IS = r"tx is an optax optimizer, e\.g\. optax\.adamw\(3e-4\); given "
INIT_IS = r"`init` is a function of \(rng\), which makes the model; given "
INIT_STATE = r"jdp\.init_state\(init, tx, plan, rng="
PAIR_OF_STEP = r"write `state, metrics = step\(state, batch\)`"
CALLS = {
    "a rule's spec is a tuple": (lambda: plan(rules=[("w", ("model",))]), PAIR + r"\('w', \('model',\)\)"),
    "one rule, not in a list": (lambda: plan(rules=("w", P("model"))), PAIR + "'w'"),
    "an entry is left open": (
        lambda: plan(rules=[("w", P(P.UNCONSTRAINED))]),
        "rule for 'w' has UNCONSTRAINED.*None for",
    ),
    "min_shard_size < 0": (lambda: plan(min_shard_size=-1), "min_shard_size is a whole .* 0 or more; given -1"),
    "a mesh axis is a float": (lambda: jdp.make_mesh(data=8.0), "Mesh axes are integers, .*; given data=8.0"),
    "a copy of a step has another setting": (
        lambda: step().changed(donate=False),
        "changed in loss_fn, plan, accumulate, check_loss, compiler; given donate. Make another step",
    ),
    "tx was not made": (lambda: state(tx=optax.adam), TX_IS + "the function adam. Call it first"),
    "tx is an nnx.Optimizer": (
        lambda: state(tx=nnx.Optimizer(linear(KEY), TX, wrt=nnx.Param)),
        TX_IS + "an Optimizer. Pass its optax transformation",
    ),
    "init is a module": (lambda: state(linear(KEY)), INIT_IS + r"a Linear\. Write lambda rng: Model"),
    "init is a tree": (lambda: state(params(KEY)), INIT_IS + "a dict.*lambda rng: params for weights that exist"),
    "init is a class of rngs": (lambda: state(OfRngs), INIT_IS + r"the class OfRngs\. Write lambda rng: OfR"),
    "init is a class": (lambda: state(nnx.Linear), INIT_IS + r"Linear\(self, in_features"),
    "init of nothing": (lambda: jdp.init(lambda: 0, plan(), rng=KEY), INIT_IS + r"<lambda>\(\)\. Write a function of"),
    "init of an optimizer's state": (lambda: jdp.init(TX.init(0), plan(), of={}), "given a tuple.*tx.init, plan, of="),
    "a leaf that is no array": (lambda: state(lambda rng: {"dtype": jnp.float32}), "holds arrays only"),
    "a tree without arrays": (lambda: state(lambda rng: {}), "must have parameters: .*given one without"),
    "a module without": (lambda: state(lambda rng: nnx.Dropout(0.1, rngs=nnx.Rngs(rng))), "given one without"),
    "init and tx exchanged": (lambda: state(TX, params), f"{INIT_IS}a Grad.*in this order: {INIT_STATE}"),
    "tx and plan exchanged": (
        lambda: jdp.init_state(params, plan(), TX, rng=KEY),
        f"A plan is a jdp.Plan, .* given a GradientTransformation.*in this order: {INIT_STATE}",
    ),
    "loss and plan exchanged": (
        lambda: jdp.make_train_step(plan(), keywords),
        r"given the function keywords\. .*order: jdp\.make_train_step\(loss_fn, plan\)",
    ),
    "loader and plan exchanged": (lambda: jdp.shard_batches(plan(), []), r"order: jdp\.shard_batches\(loader, plan\)"),
    "rows and plan exchanged": (lambda: jdp.process_rows(16, plan()), r"given 16\. .*process_rows\(plan, batch_size\)"),
    "tree and plan exchanged": (lambda: jdp.place(plan(), {}), r"given a dict\. .*order: jdp\.place\(tree, plan\)"),
    "mesh and strategy exchanged": (lambda: jdp.Plan("zero1", mesh()), "A plan's mesh is .*; given 'zero1'. Write jdp"),
    "a number of devices": (lambda: jdp.make_mesh(devices=8), "`devices` is a list of JAX devices; given 8"),
    "rows are text": (lambda: jdp.process_rows(plan(), "16"), "rows are an integer; given '16'"),
    "rows of text": (lambda: jdp.gather_rows("x"), "gather_rows takes an array of rows; given 'x'"),
    "an average of a pair": (lambda: jdp.ema_params((state(), {})), f"given a tuple.*{PAIR_OF_STEP}"),
    "a pair to verify": (lambda: jdp.verify(step(), (state(), {}), {}), rf"as in jdp\.verify\(.*{PAIR_OF_STEP}"),
    "a number as target": (lambda: jdp.verify(step(), state(), {}, 8), '"h100:1x8" or "cpu:8"; given 8'),
    "a path and a state exchanged": (lambda: jdp.save(state(), "folder"), "a path must be text .* given a TrainState"),
    "rng is an nnx.Rngs": (lambda: state(rng=nnx.Rngs(0)), r"rng is one key, .*; given a Rngs.*rngs\.params\(\)"),
    "a loss of two": (lambda: jdp.make_eval_step(lambda p, batch: 0.0, plan()), r"given <lambda>\(p, batch\)\. Write "),
    "rng is several keys": (lambda: state(rng=jax.random.split(KEY)), r"rng is one key, .*; given keys of shape \[2\]"),
    "wrt is a number": (lambda: state(linear, wrt=3), r"`wrt` is None, a path pattern .*; given 3"),
    "accumulate is a float": (lambda: step(accumulate=2.0), "accumulate is .*; given 2.0. Give an integer"),
    "rows that are columns": (
        lambda: state(
            tx=jdp.muon(0.1, muon_weight_dimension_numbers={"w": MuonDimensionNumbers(0, 0), "lora_a": None})
        ),
        "different dimensions as rows and columns",
    ),
    "decay is text": (lambda: jdp.with_ema(TX, "x"), r"decay of a moving average is a number in \[0, 1\); given 'x'"),
    "rate is None": (lambda: jdp.warmup(None, 3), "rate is a number, or an optax schedule.*; given None"),
    "a precision that is not known": (
        lambda: jdp.Precision(reduce="fp16"),
        "reduce is one of fp32, bf16; given 'fp16'",
    ),
    "buckets of nothing": (lambda: step(buckets=0), "buckets is a number of bytes, at least 1; given 0"),
    "wire is misspelt": (lambda: step(wire="int7"), "given 'int7'; did you mean int8"),
    "wire under auto": (lambda: step(wire="int8", partitioning="auto"), "leave partitioning out"),
    "no average": (lambda: jdp.ema_params(state()), r"keeps an average: jdp\.with_ema\(tx, decay=0\.999\)"),
    "offload is unknown": (lambda: plan(offload="all"), r"offload is .optimizer.*given 'all'\. Leave it out"),
    "a limit of no bytes": (lambda: jdp.keep_programs(limit_bytes=0), "at least 1; given 0"),
    "a negative rate": (
        lambda: jdp.scaled_lr(-0.1, base_batch=8, batch=8),
        r"takes positive numbers; given base_lr=-0\.1",
    ),
    "a rule of rates": (
        lambda: jdp.scaled_lr(0.1, base_batch=8, batch=8, rule="cubic"),
        "one of linear, sqrt; given 'cubic'",
    ),
    "a negative warm-up": (lambda: jdp.warmup(0.1, -1), "steps >= 0 and start >= 0; given steps=-1"),
    "a preset is misspelt": (
        lambda: step(compiler="overlop"),
        '"auto", "default", "overlap", .*given \'overlop\'; did you mean overlap',
    ),
    "an option's name": (lambda: step(compiler={"latency": True}), "begin with xla_; given 'latency'"),
    "an option's value": (
        lambda: step(compiler={"xla_gone": [True]}),
        r"true or false, a number or text; given xla_gone = \[True\]",
    ),
    "GPT-2's names of a ResNet": (
        lambda: gpt2_names(ResNetConfig(2, (1,))),
        "GPT-2's names .*GPTConfig; given ResNetConfig",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_bad_calls_are_one_error_with_the_fix(case):
    call, message = CALLS[case]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert type(caught.value).__module__.startswith("jdp.") and isinstance(caught.value, UserError)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    files = [str(entry.path) for entry in caught.traceback]
    assert not any(f"{Path(jdp.__file__).parent}/" in file for file in files), files  # it ends in the user's line


def test_numbers_of_numpy_are_numbers():
    assert plan(min_shard_size=np.int64(0)).min_shard_size == 0
    made = step(accumulate=np.int32(2), clip_norm=np.float32(1))
    assert (made.settings.accumulate, made.settings.clip_norm) == (2, 1.0)
    assert jdp.make_mesh(data=np.int64(8)).shape == {"data": 8}
    assert jdp.scaled_lr(np.float32(0.1), base_batch=np.int64(1), batch=2) == pytest.approx(0.2)


def test_replicated_weights_are_on_the_errors_page():
    """Under zero3 they are sharded at rest, and `jax.device_put` gathers them."""
    placed = plan(min_shard_size=8)
    weights = jdp.place({"w": jnp.ones((8, 4))}, placed)
    total = jax.jit(lambda params: params["w"].sum(), in_shardings=(placed.replicated,))
    with pytest.raises(ValueError, match="Sharding passed to jit does not match") as caught:
        total(weights)
    page = Path(jdp.__file__).parent / "guard/errors_of_jax.md"
    assert str(caught.value).partition(".")[0] in page.read_text(encoding="utf-8")
    assert total(jax.device_put(weights, placed.replicated)) == 8 * 4
