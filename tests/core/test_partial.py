"""Partial training (`wrt`): the frozen part has no gradient and no optimizer state, and is sharded all the same.

The reference is one device with plain optax: a gradient with respect to the trained leaves alone. Sums over eight
devices run in another order (1e-7 of each gradient), and Adam's division keeps that relative: the bounds are wide.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

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


def is_lora_b(path, variable):
    return path[-1] == "lora_b"


CASES = {
    "LoRA": (init_module, nnx.LoRAParam, ("blocks/lora/lora_a", "blocks/lora/lora_b")),
    "a callable": (init_module, is_lora_b, ("blocks/lora/lora_b",)),
    "a pytree": (init_tree, "head/*", ("head/bias", "head/kernel")),
}
TX = optax.adamw(1e-2, eps=1e-4)


def batches(steps=3):
    random = np.random.default_rng(0)
    for _ in range(steps):
        x, y, weight = (random.normal(size=s) for s in ((ROWS, WIDTH), (ROWS, 4), ROWS))
        yield {"x": np.float32(x), "y": np.float32(y), "weight": np.float32(np.abs(weight))}


def plan_of(strategy, devices=8):
    return jdp.Plan(jdp.make_mesh(devices=jax.devices()[:devices]), strategy, min_shard_size=64)


def flat(tree):
    return {
        jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x) for p, x in jax.tree.leaves_with_path(tree)
    }


@functools.cache
def initial(case):
    """The initial state on one device; it is the same on any mesh (`test_init`), so each plan lays out this one."""
    init, wrt, _ = CASES[case]
    return jdp.init_state(init, TX, plan_of("ddp", 1), rng=jax.random.key(0), wrt=wrt)


@functools.cache
def reference(case):
    """The losses, gradient norms and last parameters of plain optax over the trained leaves, and the first ones."""
    trained, state = CASES[case][2], initial(case)
    whole, adapter = flat(state.params), state.static.adapter
    nested = jax.tree.structure(state.params)
    part = {path: whole[path] for path in trained}
    opt_state, losses, norms = TX.init(part), [], []

    @jax.jit
    def step(part, opt_state, batch):
        def mean(part):
            params = jax.tree.unflatten(nested, list({**whole, **part}.values()))
            loss = loss_fn(params if adapter is None else adapter.merge(params, {}, None), batch, None)
            return loss.total / loss.weight

        loss, grads = jax.value_and_grad(mean)(part)
        updates, opt_state = TX.update(grads, opt_state, part)
        return optax.apply_updates(part, updates), opt_state, loss, optax.tree.norm(grads)

    for batch in batches():
        part, opt_state, loss, norm = step(part, opt_state, batch)
        losses.append(float(loss)), norms.append(float(norm))
    return whole, {path: np.asarray(x) for path, x in part.items()}, losses, norms


@pytest.mark.parametrize(
    ("case", "strategy", "partitioning"),
    [
        *(("LoRA", strategy, "manual") for strategy in ("ddp", "zero2", "zero3")),
        *(("LoRA", strategy, "auto") for strategy in ("zero1", "zero3")),
        *(("a pytree", "ddp", "auto"), ("a pytree", "zero1", "manual"), ("a pytree", "zero3", "manual")),
    ],
)
def test_partial_training_equals_one_device_and_leaves_the_frozen_part_alone(case, strategy, partitioning):
    """Every strategy in both partitionings, by one case or the other; zero2 under auto is zero1."""
    trained = CASES[case][2]
    first, wanted, losses, norms = reference(case)
    plan = plan_of(strategy)
    state = jdp.place(initial(case), plan)
    step = jdp.make_train_step(loss_fn, plan, partitioning=partitioning, accumulate=2, donate=False)  # `initial` stays
    for batch, loss, norm in zip(batches(), losses, norms, strict=True):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(float(metrics["loss"]), loss, rtol=1e-5)
        np.testing.assert_allclose(float(metrics["grad_norm"]), norm, rtol=1e-4)  # of the trained leaves only
    for path, value in flat(state.params).items():
        if path in trained:
            np.testing.assert_allclose(value, wanted[path], rtol=1e-4, atol=1e-5, err_msg=path)
            assert not np.array_equal(value, first[path]), path
        else:
            np.testing.assert_array_equal(value, first[path], err_msg=path)
    for place, leaf in zip(plan.placements(state), jax.tree.leaves(state), strict=True):
        if place.path != "rng":
            assert leaf.addressable_shards[0].data.nbytes == place.bytes_per_device, place.path


@pytest.mark.parametrize("case", CASES)
def test_frozen_leaves_have_no_optimizer_state_and_rest_sharded(case):
    init, wrt, trained = CASES[case]
    plan = plan_of("zero1")
    state = jdp.abstract_state(init, TX, plan, rng=jax.random.key(0), wrt=wrt)
    places = {place.path: place for place in plan.placements(state)}
    assert {path.removeprefix("params/") for path, p in places.items() if p.trained and path[:7] == "params/"} == {
        *trained
    }
    moments = {path.partition("/mu/")[2] for path in places if "/mu/" in path}
    assert moments == {*trained}
    frozen = [p for path, p in places.items() if not p.trained and len(p.shape) >= 2 and np.prod(p.shape) >= 64]
    assert frozen and all("data" in p.rest for p in frozen)
    assert state.static.trained == tuple(p.trained for path, p in places.items() if path.startswith("params/"))


def test_clipping_looks_at_the_trained_leaves_only():
    """The frozen part's gradient would be far larger: with it the trained one would be clipped to almost nothing."""
    init = lambda rng: {"frozen": jnp.full((8, 8), 1e3), "w": jnp.ones(8)}  # noqa: E731
    loss = lambda p, b, rng: jdp.Loss((b["x"] @ p["frozen"] * 1e-3 @ p["w"]).sum(), jnp.float32(len(b["x"])))  # noqa: E731
    plan = plan_of("zero2")
    state = jdp.init_state(init, optax.sgd(1.0), plan, rng=jax.random.key(0), wrt="w")
    state, metrics = jdp.make_train_step(loss, plan, clip_norm=0.5)(state, {"x": np.ones((8, 8), np.float32)})
    np.testing.assert_allclose(float(metrics["grad_norm"]), 8 * 8**0.5, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(state.params["w"]), 1 - 0.5 / 8**0.5, rtol=1e-5)


def test_precision_is_that_of_the_trained_part():
    """Frozen bf16 weights beside trained fp32 ones; bf16 trained ones are refused as ever."""
    plan = plan_of("zero3")
    state = jdp.abstract_state(init_tree, TX, plan, rng=jax.random.key(0), wrt="head/*")
    new, _ = jax.eval_shape(jdp.make_train_step(loss_fn, plan, precision="bf16"), state, next(batches()))
    assert {str(x.dtype) for x in jax.tree.leaves(new.params)} == {"bfloat16", "int8", "float32"}
    state = jdp.abstract_state(init_tree, TX, plan, rng=jax.random.key(0), wrt=["head/*", "body/w"])
    with pytest.raises(ValueError, match=r"Precision\.params is fp32, but body/w rests in bfloat16"):
        jax.eval_shape(jdp.make_train_step(loss_fn, plan), state, next(batches()))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_contract_counts_gradients_of_what_is_trained_and_gathers_of_all(strategy):
    plan = plan_of(strategy)
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


def test_frozen_weights_are_gathered_layer_by_layer_and_as_they_rest():
    """Under ZeRO-3 the stacked frozen kernels are gathered inside the loop, and narrow ones in their own dtype."""
    plan = plan_of("zero3")
    state = jdp.abstract_state(init_module, TX, plan, rng=jax.random.key(0), wrt=nnx.LoRAParam)
    report = jdp.verify(jdp.make_train_step(loss_fn, plan, partitioning="manual"), state, next(batches()), cache=False)
    kernels = [s.collective for s in report.collectives if s.collective.kind == "all-gather"]
    assert kernels and all(c.payload_bytes <= 4 * WIDTH * WIDTH for c in kernels)
    tree = jdp.abstract_state(init_tree, TX, plan, rng=jax.random.key(0), wrt="head/*")
    jaxpr = str(jax.make_jaxpr(jdp.make_train_step(loss_fn, plan, partitioning="manual"))(tree, next(batches())))
    gathered = {
        line.split(":")[1].split(" =")[0]
        for line in jaxpr.splitlines()
        if " all_gather[" in line or "= all_gather" in line
    }
    assert {"bf16[32,32]", "i8[32,32]"} <= gathered, gathered


# Bad input.


@pytest.mark.parametrize(
    ("init", "wrt", "words"),
    [
        (
            init_tree,
            "heads/*",
            r"Every pattern of `wrt` must match a parameter; 'heads/\*' matches none of body/table, ",
        ),
        (init_tree, ["head/*", "x"], "'x' matches none of body/table, body/w, head/bias, head/kernel"),
        (init_tree, (), r"must leave something to train; \(\) matches none of"),
        (init_tree, nnx.LoRAParam, "For a pytree, `wrt` is a path pattern"),
        (init_module, nnx.BatchStat, r"must leave something to train; .*BatchStat.* matches none of .* and 1 more"),
        (init_tree, None, "Every parameter that is trained must be floating point; body/table is int8. Freeze it"),
    ],
)
def test_a_filter_that_does_not_fit_is_one_clear_error(init, wrt, words):
    with pytest.raises(ValueError, match=words):
        jdp.abstract_state(init, TX, plan_of("zero1"), rng=jax.random.key(0), wrt=wrt)
