"""`jdp.value_and_grad`, `jdp.init` and `jdp.place`: values, layouts, what is written back, and what is refused.

Whole loops are compared with one device in test_loops.py. Here models have two or three small leaves; min_shard_size=0
shards them all the same.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiny_states import assert_same_bits
from trainings import assert_close
from trainings import plan_of as _plan_of

import jdp
from jdp.foresight.program.collectives import collectives, traffic

KEY, ROWS, WIDTH = jax.random.key(0), 16, 8


def plan_of(strategy="zero2", devices=4):
    return _plan_of(strategy, devices, min_shard_size=0)


def init(rng):
    return {"w": jax.random.normal(rng, (WIDTH, 4)), "b": jnp.zeros(4)}


def batch_of():
    random = np.random.default_rng(0)
    return {"x": random.normal(size=(ROWS, WIDTH)).astype("float32"), "weight": np.arange(ROWS, dtype="float32")}


def squares(params, batch, rng):
    y = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return jdp.Loss((jnp.square(y).mean(1) * batch["weight"]).sum(), batch["weight"].sum())


def distance(params, other, batch, rng):
    y = batch["x"] @ params["w"] + params["b"] - batch["x"] @ other["w"]
    return jdp.Loss((jnp.square(y).mean(1) * batch["weight"]).sum(), batch["weight"].sum())


class Net(nnx.Module):
    """A layer, batch norm, dropout, and a layer with low-rank adapters."""

    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, 16, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.LoRA(16, 2, 4, base_module=nnx.Linear(16, 4, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def net(rng):
    return Net(nnx.Rngs(rng))


def net_loss(model, batch, rng):
    return jdp.Loss(jnp.square(model(batch["x"])).sum(), jnp.float32(len(batch["x"])))


def specs(tree):
    """path -> spec of each array with dimensions."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf.sharding.spec for path, leaf in leaves if leaf.ndim}


@pytest.mark.parametrize("make", [init, net], ids=["tree", "module"])
def test_trees_are_made_sharded_bit_for_bit(make):
    """One seed makes one model, of `jdp.init` and of `jdp.init_state`."""

    def arrays(model, *kinds):
        return nnx.state(model, *kinds or [nnx.Not(nnx.RngState)]) if make is net else model

    made = jdp.init(make, plan_of(), rng=KEY)
    assert_same_bits(arrays(made), jax.jit(lambda key: arrays(make(key)))(KEY))
    parameters = arrays(made, nnx.Param)
    trained = jdp.init_state(make, optax.sgd(0.1), plan_of("ddp", 2), rng=KEY).params
    assert_same_bits(*map(jax.tree.leaves, (parameters, trained)))
    assert all(not leaf.is_fully_replicated for leaf in jax.tree.leaves(parameters))
    assert all(len(leaf.addressable_shards) == 4 for leaf in jax.tree.leaves(arrays(made)))


def test_derived_trees_are_sharded_like_parameters():
    params = jdp.init(init, plan_of(), rng=KEY)
    opt_state = jdp.init(optax.adam(1e-2).init, plan_of(), of=params)
    assert list(specs(opt_state).values()) == 2 * list(specs(params).values()) == 4 * [P("data")]
    module = jdp.init(net, plan_of(), rng=KEY)
    optimizer = jdp.init(lambda state: nnx.Optimizer(state, optax.adam(1e-2), wrt=nnx.Param), plan_of(), of=module)
    assert type(optimizer) is nnx.Optimizer
    kernel = module.first.kernel.get_value().sharding
    assert optimizer.opt_state[0].mu["first"]["kernel"].get_value().sharding.is_equivalent_to(kernel, 2)


def test_placing_changes_no_bit():
    tree = {"w": np.arange(32, dtype="float32").reshape(8, 4), "n": np.int32(3)}
    placed = jdp.place(tree, plan_of("zero3"))
    assert placed["w"].sharding == NamedSharding(plan_of().mesh, P("data"))
    for plan in (plan_of("ddp"), plan_of("zero1", 8), plan_of("ddp", 1), plan_of("zero3")):
        placed = jdp.place(placed, plan)
        assert placed["w"].is_fully_replicated == (plan.strategy == "ddp")
        assert_same_bits(placed, tree)
    within = jax.jit(lambda tree: jdp.place(tree, plan_of("zero3")))(jdp.place(placed, plan_of("ddp")))
    assert specs(within) == specs(placed)
    room = np.zeros(4096, "float32")
    aligned = room[-room.ctypes.data % 64 // 4 :][:2048]  # on CPUs JAX may share such a buffer
    placed = jdp.place({"w": aligned}, plan_of("ddp", 1))
    aligned[:] = 1
    assert not placed["w"].any()


@pytest.mark.parametrize("partitioning", ["auto", "manual"])
@pytest.mark.default_ids("manual")
def test_both_of_two_models_are_differentiated(partitioning):
    """Called by itself, and in jit. Against `jax.value_and_grad`, rows having unequal weights; float32 sums in another
    order."""
    params, other = (jdp.init(init, plan_of("zero3"), rng=jax.random.key(i)) for i in (0, 1))
    settings = {"accumulate": 2, "partitioning": partitioning, "check_loss": False}
    gradient = jdp.value_and_grad(distance, plan_of("zero3"), argnums=(1, 0), **settings)
    call = jax.jit(gradient) if partitioning == "manual" else gradient
    metrics, grads = call(params, other, batch_of(), KEY)

    def objective(params, other):
        loss = distance(params, other, batch_of(), KEY)
        return loss.total / loss.weight

    loss, (first, second) = jax.jit(jax.value_and_grad(objective, (0, 1)))(*jax.device_get((params, other)))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    assert float(metrics["weight"]) == sum(range(ROWS))
    assert_close(grads, (second, first))  # in the order of argnums
    assert specs(grads[1]) == specs(params)


@pytest.mark.rest
def test_a_shared_module_gets_its_whole_gradient():
    """In one nnx.Dict; as two arguments of a gradient it is refused."""

    def pair_of(rng):
        encoder = nnx.Linear(WIDTH, 8, rngs=nnx.Rngs(rng))
        return nnx.Dict(actor=encoder, critic=nnx.List([encoder]))

    def gradient(pair, call):
        loss = lambda pair, batch, rng: jdp.Loss(jnp.square(call(pair, batch["x"])).sum(), ROWS)  # noqa: E731
        return jdp.value_and_grad(loss, plan_of())(pair, batch_of(), KEY)[1]

    for pair in (jdp.init(pair_of, plan_of(), rng=KEY), jdp.place(pair_of(KEY), plan_of())):
        both = gradient(pair, lambda p, x: p.actor(x) + p.critic[0](x))
        twice = gradient(pair, lambda p, x: 2 * p.actor(x))
        assert_close(*map(jax.tree.leaves, (both, twice)))
    with pytest.raises(ValueError, match=r"given two that share (0/)?bias\. Make one module of both: pair = nnx\.Dict"):
        jdp.value_and_grad(distance, plan_of(), argnums=(0, 1))(pair.actor, pair.critic, batch_of(), KEY)


@pytest.mark.rest
def test_filtered_out_leaves_have_no_gradients():
    """Those of a module: test_nnx."""
    _, grads = jdp.value_and_grad(squares, plan_of(), wrt="w")(jdp.init(init, plan_of(), rng=KEY), batch_of(), KEY)
    assert grads["b"] is None


def test_modules_keep_their_mode_and_what_calls_change():
    """In training, batch norm's averages move to those of all rows; in evaluation nothing changes or is drawn."""
    module, batch = jdp.init(net, plan_of(), rng=KEY), batch_of()
    gradient = jdp.value_and_grad(net_loss, plan_of(), check_loss=False)
    hidden = jax.device_get(module.first(batch["x"]))
    module.eval()
    losses = [float(gradient(module, batch, jax.random.key(i))[0]["loss"]) for i in (0, 1)]
    assert losses[0] == losses[1]
    assert not jax.device_get(module.norm.mean.get_value()).any()
    module.train()
    losses = [float(gradient(module, batch, jax.random.key(i))[0]["loss"]) for i in (0, 1)]
    assert losses[0] != losses[1]
    expected = hidden.mean(0) * (1 - 0.99**2)  # momentum 0.99, twice the same rows
    np.testing.assert_allclose(module.norm.mean.get_value(), expected, rtol=1e-5, atol=1e-7)
    assert module.norm.mean.get_value().is_fully_replicated


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_several_gradients_each_send_their_promise(strategy):
    """Payloads on four devices, K = 2, of two models of Ψ parameters, each differentiated once and read once.

    Each gradient reduce-scatters r·Ψ (zero2 and zero3: K·r·Ψ) and gathers both models, c·Ψ each (zero3: in every
    microbatch); XLA may share the gather of a model that was not updated in between. Scalars are all-reduced. XLA would
    leave a model gathered that is read after its update, and its optimizer's state.
    """
    plan, tx, count = plan_of(strategy), optax.adam(1e-2), WIDTH * 4 + 4
    models = [jdp.init(init, plan, rng=jax.random.key(i)) for i in (0, 1)]
    opt_states = [jdp.init(tx.init, plan, of=model) for model in models]
    gradient = jdp.value_and_grad(distance, plan, accumulate=2, check_loss=False)

    @jax.jit
    def step(first, second, opt_states, batch):
        _, grads = gradient(first, second, batch, KEY)
        updates, opt_state = tx.update(grads, opt_states[0])
        first = optax.apply_updates(first, updates)
        _, grads = gradient(second, first, batch, KEY)
        updates, its_opt_state = tx.update(grads, opt_states[1])
        return first, optax.apply_updates(second, updates), [opt_state, its_opt_state]

    given = *models, opt_states, jax.device_put(batch_of(), plan.batch_sharding)
    compiled = step.lower(*given).compile()
    assert specs(compiled(*given)) == specs((*models, opt_states))
    sent = traffic(collectives(compiled.as_text()))
    microbatches = 1 if strategy == "zero1" else 2
    assert sent["reduce-scatter"] == 2 * microbatches * 4 * count
    used = 2 * count + WIDTH * 4 * 2  # of the model that is read, `w` alone
    gathers = 2 if strategy == "zero3" else 1
    assert sent["all-gather"] <= gathers * 4 * used
    assert sent.get("all-reduce", 0) <= 64
    assert sent.keys() <= {"reduce-scatter", "all-gather", "all-reduce"}


def params(plan=None):
    return jdp.init(init, plan or plan_of(), rng=KEY)


def gradient(**settings):
    return jdp.value_and_grad(squares, plan_of(), **settings)


def donated():
    """A model whose memory was taken after a call that knew it."""
    model, grad = params(), gradient()
    grad(model, batch_of(), KEY)
    jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(model)
    grad(model, batch_of(), KEY)


def two_plans():
    """The second model lies by another plan, in a later call too."""
    grad = jdp.value_and_grad(distance, plan_of())
    grad(params(), params(), batch_of(), KEY)
    grad(params(), params(plan_of("ddp")), batch_of(), KEY)


def in_shard_map():
    call = lambda p, batch: gradient()(p, batch, KEY)[0]["loss"]  # noqa: E731
    mapped = jax.shard_map(call, mesh=plan_of().mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    jax.jit(mapped)(params(plan_of("ddp")), batch_of())


def closed_over():
    """A jitted function closes over a module with batch statistics, which the call would change."""
    model = jdp.init(lambda rng: nnx.BatchNorm(8, rngs=nnx.Rngs(rng)), plan_of(), rng=KEY)
    grad = jdp.value_and_grad(lambda model, batch, rng: jnp.square(model(batch["x"])).mean(), plan_of())
    nnx.jit(lambda batch: grad(model, batch, KEY)[0]["loss"])({"x": jnp.ones((8, 8))})


def offloading():
    return jdp.Plan(jdp.make_mesh(), offload="optimizer")


ON_HOST = r"on the devices; given a plan with offload='optimizer'.*make_train_step"
ARRAYS = r"A tree to shard holds arrays only; \['f'\] is "
INSIDE = "A tree is one module, one nnx.Optimizer, or a pytree of arrays; given a "
CALLS = {
    "no loss": (lambda: jdp.value_and_grad(42, plan_of()), "A loss is a function of .*; given 42"),
    "too few": (lambda: gradient()(params(), batch_of()), "models, a batch and a key; given 2 arguments.*Call it as"),
    "argnums past the models": (
        lambda: jdp.value_and_grad(lambda *_: 0.0, plan_of(), argnums=1)(params(), batch_of(), KEY),
        "given 3 .*, with argnums=1",
    ),
    "argnums": (lambda: gradient(argnums=(0, 0)), "argnums is the number of a model, .*; given " + r"\(0, 0\)"),
    "wrt of several": (lambda: gradient(argnums=(0, 1), wrt="w"), r"wrt .* of one model; given argnums=\(0, 1\)"),
    "wrt matches nothing": (lambda: gradient(wrt="z")(params(), batch_of(), KEY), "'z' matches none of b, w"),
    "another plan": (
        two_plans,
        r"shardings of its plan \(zero2 .*'data'.* for model 1: b; given .* Move it once: model =",
    ),
    "donated": (donated, "A model must hold its arrays; b was donated to a jitted function. Continue with"),
    "in shard_map": (in_shard_map, "given a call inside a shard_map over data. Call it outside"),
    "a module closed over": (closed_over, "given a module that the function closes over, and mean, var would"),
    "no array": (
        lambda: gradient()({**params(), "f": jnp.tanh}, batch_of(), KEY),
        ARRAYS + "<PjitFunction.*Close over",
    ),
    "modules in a dict": (
        lambda: gradient()({"m": jdp.init(net, plan_of(), rng=KEY)}, batch_of(), KEY),
        INSIDE + r"dict with a module at \['m'\]\. Pass each module by itself",
    ),
    "no parameters": (lambda: gradient()({}, batch_of(), KEY), "A model must have parameters: .*; given one without"),
    "init without": (
        lambda: jdp.init(init, plan_of()),
        "jdp.init takes either rng, for a model, or of, .*; given neither",
    ),
    "offloaded": (lambda: jdp.value_and_grad(squares, offloading()), ON_HOST),
    "place: offloaded": (lambda: jdp.place({"w": np.ones(8)}, offloading()), ON_HOST),
    "place: integers": (
        lambda: jdp.place({"n": np.array([2**40])}, plan_of()),
        "JAX holds int64 as int32; given 109951",
    ),
    "place: keys": (lambda: jdp.place({0: 1.0, "0": 1.0}, plan_of()), r"must have an order.*given \[0, '0'\]\. Write"),
    "place: an optimizer": (
        lambda: jdp.place(nnx.Optimizer(net(KEY), optax.sgd(0.1), wrt=nnx.Param), plan_of()),
        "given an nnx.Optimizer alone. Pass its model: of=model",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_cannot_mean_anything_is_refused(name):
    call, message = CALLS[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_a_model_that_is_closed_over_is_reported(capfd, fresh_notices):
    """Its weights are constants of the program: a loop that updates it outside trains on the first ones for ever."""
    model, grad, batch = params(), gradient(check_loss=False), batch_of()
    told = "a gradient inside a jitted function {} a model that this function closes over"
    jax.jit(lambda model, batch: grad(model, batch, KEY)[0])(model, batch)
    assert "closes over" not in capfd.readouterr().err
    jax.jit(lambda batch: grad(model, batch, KEY)[0])(batch)
    assert told.format("differentiates") in capfd.readouterr().err
    teacher, match = params(), jdp.value_and_grad(distance, plan_of(), check_loss=False)
    jax.jit(lambda model, batch: match(model, teacher, batch, KEY)[0])(model, batch)
    assert told.format("reads") in capfd.readouterr().err


def test_models_changed_after_a_call_are_taken():
    """Another layer in a module: as by a gradient that was never called before."""
    called, anew = (jdp.value_and_grad(net_loss, plan_of(), check_loss=False) for _ in range(2))
    model = jdp.init(net, plan_of(), rng=KEY)
    first = called(model, batch_of(), KEY)
    model.last = nnx.Linear(16, 4, rngs=nnx.Rngs(3))
    model = jdp.place(model, plan_of())
    copy = nnx.clone(model)
    found, expected = called(model, batch_of(), KEY), anew(copy, batch_of(), KEY)
    assert_same_bits(found, expected)
    assert found[0]["loss"] != first[0]["loss"]
    assert_same_bits(nnx.state(model, nnx.BatchStat), nnx.state(copy, nnx.BatchStat))


def test_a_key_in_a_closure_is_reported(capfd, monkeypatch):
    """A jitted function then draws the same in each call; a loss that draws nothing may."""

    def noisy(params, batch, rng):
        return squares(params, {**batch, "x": batch["x"] + jax.random.normal(rng, batch["x"].shape)}, rng)

    grads = [jdp.value_and_grad(loss, plan_of(), check_loss=False) for loss in (noisy, squares, net_loss)]
    (grad, plain, of_net), model, batch, module = grads, params(), batch_of(), jdp.init(net, plan_of(), rng=KEY)
    module.eval()
    for is_reported, call in (
        (False, lambda: jax.jit(lambda model: plain(model, batch, KEY)[0])(model)),
        (False, lambda: nnx.jit(lambda module: of_net(module, batch, KEY)[0])(module)),
        (False, lambda: jax.jit(grad)(model, batch, KEY)),
        (True, lambda: jax.jit(lambda model: grad(model, batch, KEY)[0])(model)),
    ):
        monkeypatch.setattr("jdp.base.notices._said", set())
        call()
        assert ("closes over the key" in capfd.readouterr().err) == is_reported
