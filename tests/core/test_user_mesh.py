"""Meshes that users bring, with Explicit axes and other names for the batch's: what jdp returns lies on them."""

import contextlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from jdp.base import notices
from jdp.guard.nonfinite import Inspection
from jdp.guard.replicas import check_replicas

DEVICES = jax.devices()
EXPLICIT = jax.make_mesh((2, 4), ("slow", "batch"), devices=DEVICES)
AUTO = jax.make_mesh((2, 4), ("slow", "batch"), devices=DEVICES, axis_types=(AxisType.Auto,) * 2)
MIXED = jax.make_mesh((2, 4), ("slow", "batch"), devices=DEVICES, axis_types=(AxisType.Auto, AxisType.Explicit))
OURS = jdp.make_mesh(replica=2, data=4)
NAMES = {"data": "batch", "replica": "slow"}
BATCH = {"x": np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)}
TX = optax.adam(1e-2)


def make(rng):
    return {"w": jax.random.normal(rng, (32, 64)), "b": jnp.zeros(64)}


def loss(params, batch, rng):
    squares = ((batch["x"] @ params["w"] + params["b"]) ** 2).sum(-1)
    return jdp.Loss(squares.sum(), jnp.float32(len(squares)))


def own_plan(mesh, strategy, **settings):
    return jdp.Plan(mesh, strategy, min_shard_size=64, **({} if mesh is OURS else NAMES), **settings)


def within(mesh, is_set):
    return jax.set_mesh(mesh) if is_set else contextlib.nullcontext()


def losses_of_own_loop(mesh, strategy, partitioning, how):
    """Three steps of a loop of the user's own, under `jax.set_mesh`, on resharded parameters, or neither."""
    plan = own_plan(mesh, strategy)
    with within(mesh, how != "plain"):
        params = jdp.init(make, plan, rng=jax.random.key(0))
        opt_state = jdp.init(TX.init, plan, of=params)
        if how == "reshard":
            params = jax.tree.map(lambda x: jax.sharding.reshard(x, P(*x.sharding.spec)), params)
        gradient = jdp.value_and_grad(loss, plan, partitioning=partitioning)

        @jax.jit
        def step(params, opt_state, batch, key):
            metrics, grads = gradient(params, batch, key)
            updates, opt_state = TX.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, metrics["loss"], grads

        losses = []
        batch = next(iter(jdp.shard_batches([BATCH], plan)))
        for _ in range(3):
            params, opt_state, value, grads = step(params, opt_state, batch, jax.random.key(1))
            losses.append(float(value))
    rest = jax.tree.map(plan.rest_sharding, plan.tree_placements(params))
    for tree in (params, grads, opt_state[0].mu):
        assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, tree, rest))
    assert jax.typeof(params["w"]).sharding.mesh == mesh.abstract_mesh
    return losses


LOOPS = {  # both partitionings and every way with each strategy, and each pair of the two with one at least
    "ddp": [("auto", "plain"), ("manual", "set_mesh"), ("auto", "reshard")],
    "zero1": [("manual", "plain"), ("auto", "set_mesh"), ("manual", "reshard")],
    "zero3": [("auto", "plain"), ("auto", "set_mesh"), ("manual", "reshard")],
}


@pytest.mark.parametrize("strategy", LOOPS)
def test_a_loop_of_ones_own_computes_the_same_on_an_explicit_mesh(strategy):
    expected = losses_of_own_loop(OURS, strategy, "auto", "plain")
    for partitioning, how in LOOPS[strategy]:
        assert losses_of_own_loop(EXPLICIT, strategy, partitioning, how) == pytest.approx(expected, rel=1e-6)


def test_the_types_of_what_jdp_returns_say_the_sharding():
    plan = own_plan(EXPLICIT, "zero3")
    params = jdp.init(make, plan, rng=jax.random.key(0))
    doubled = jax.jit(lambda tree: jdp.place(jax.tree.map(lambda x: 2 * x, tree), plan))(params)
    batch = next(iter(jdp.shard_batches([BATCH], plan)))
    shown = [str(jax.typeof(x)) for x in (params["w"], doubled["w"], jdp.place(BATCH["x"], plan), batch["x"])]
    assert shown == [
        "float32[32,64@batch]",
        "float32[32,64@batch]",
        "float32[16,32@batch]",
        "float32[16@(slow,batch),32]",
    ]
    state = jdp.init_state(make, TX, plan, rng=jax.random.key(0))
    abstract = jdp.abstract_state(make, TX, plan, rng=jax.random.key(0))
    assert [x.sharding for x in jax.tree.leaves(abstract)] == [x.sharding for x in jax.tree.leaves(state)]


def steps(mesh, is_set, strategy="zero1", **settings):
    plan = own_plan(mesh, strategy)
    with within(mesh, is_set):
        state = jdp.init_state(make, TX, plan, rng=jax.random.key(0))
        step = jdp.make_train_step(loss, plan, **settings)
        before = [x.sharding for x in jax.tree.leaves(state)]
        for _ in range(3):
            state, metrics = step(state, BATCH)
    assert [x.sharding for x in jax.tree.leaves(state)] == before  # jax compiles a program for each
    assert all(x.sharding.mesh == mesh for x in jax.tree.leaves((state, metrics)))
    return plan, state, metrics


@pytest.fixture(scope="module")
def expected():
    return steps(OURS, is_set=False, partitioning="manual")


@pytest.mark.parametrize("is_set", [False, True], ids=["plain", "set_mesh"])
@pytest.mark.parametrize("mesh", [EXPLICIT, AUTO, MIXED], ids=["explicit", "auto", "mixed"])
def test_a_step_keeps_the_state_on_the_users_mesh(mesh, is_set, expected):
    _, state, metrics = steps(mesh, is_set, partitioning="manual")
    np.testing.assert_array_equal(metrics["loss"], expected[2]["loss"])
    jax.tree.map(np.testing.assert_array_equal, state.params, expected[1].params)


def test_model_axes_inside_a_step_under_a_mesh_with_other_names():
    """jax looks the axes of a `shard_map` inside of another up in the mesh that the user has set."""
    mesh = jax.make_mesh((2, 2, 2), ("slow", "batch", "model"), devices=DEVICES)
    plan = jdp.Plan(mesh, "zero3", rules=[("w", P(None, "model"))], min_shard_size=64, **NAMES)
    with jax.set_mesh(mesh):
        state = jdp.init_state(make, TX, plan, rng=jax.random.key(0))
        state, metrics = jdp.make_train_step(loss, plan, partitioning="manual")(state, BATCH)
    assert str(jax.typeof(state.params["w"])) == "float32[32@batch,64@model]"
    alone = jdp.Plan(jdp.make_mesh(data=1, devices=DEVICES[:1]))
    single = jdp.init_state(make, TX, alone, rng=jax.random.key(0))
    expected = jdp.make_train_step(loss, alone)(single, BATCH)[1]["loss"]
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)


def test_modules_and_their_optimizers_under_an_explicit_mesh():
    def of_module(model, batch, rng):
        return jdp.Loss((model(batch["x"]) ** 2).sum(), jnp.float32(len(batch["x"])))

    def run(mesh):
        plan = own_plan(mesh, "zero1")
        with within(mesh, mesh is EXPLICIT):

            def build(rng):
                rngs = nnx.Rngs(rng)
                return nnx.Sequential(nnx.Linear(32, 64, rngs=rngs), nnx.BatchNorm(64, rngs=rngs))

            model = jdp.init(build, plan, rng=jax.random.key(0))
            optimizer = jdp.place(nnx.Optimizer(model, TX, wrt=nnx.Param), plan, of=model)
            gradient = jdp.value_and_grad(of_module, plan)

            @nnx.jit
            def step(model, optimizer, batch, key):
                metrics, grads = gradient(model, batch, key)
                optimizer.update(model, grads)
                return metrics["loss"]

            losses = [float(step(model, optimizer, BATCH, jax.random.key(1))) for _ in range(2)]
        return losses, np.asarray(model.layers[1].mean[...]), jax.typeof(model.layers[0].kernel[...])

    (losses, mean, _), (explicit, explicit_mean, aval) = run(OURS), run(EXPLICIT)
    assert explicit == losses and str(aval) == "float32[32,64@batch]"
    np.testing.assert_array_equal(explicit_mean, mean)


def test_the_guards_read_states_on_explicit_meshes():
    plan, state, _ = steps(EXPLICIT, is_set=True, strategy="ddp")
    with jax.set_mesh(EXPLICIT):
        assert check_replicas(state) == len(jax.tree.leaves(state))
        broken = {"x": np.where(np.arange(16)[:, None] == 3, np.nan, BATCH["x"])}
        found = Inspection(jdp.make_train_step(loss, plan)).of(state, broken, 1)
    assert found.batch[0].places == (3,)


def test_forecasts_of_a_step_on_an_explicit_mesh_are_those_of_any_mesh():
    def verified(mesh):
        plan = own_plan(mesh, "zero1")
        abstract = jdp.abstract_state(make, TX, plan, rng=jax.random.key(0))
        return str(jdp.verify(jdp.make_train_step(loss, plan, partitioning="manual"), abstract, BATCH))

    assert verified(EXPLICIT) == verified(OURS)


def test_a_loss_that_closes_over_an_explicit_array_is_told_what_to_do():
    with jax.set_mesh(EXPLICIT):
        scale = jnp.ones(64)
        state = jdp.init_state(make, TX, own_plan(EXPLICIT, "ddp"), rng=jax.random.key(0))

        def closing(params, batch, rng):
            return jdp.Loss((batch["x"] @ params["w"] * scale).sum(), jnp.float32(16))

        with pytest.raises(Exception, match="mesh") as raised:
            jdp.make_train_step(closing, own_plan(EXPLICIT, "ddp"))(state, BATCH)
    assert [note.partition(":")[0] for note in raised.value.__notes__ if "closed over" in note] == ["jdp"]


# Names.


def test_rules_metadata_and_messages_have_the_users_names(monkeypatch, caplog):
    monkeypatch.setattr(notices, "_said", set())
    caplog.set_level("INFO", "jdp")
    plan = own_plan(EXPLICIT, "zero1", rules=[("w", P("batch"))])
    assert str(plan) == "zero1 on slow=2 × batch=4 cpu devices: gathered once a step"
    assert plan.batch_sharding == NamedSharding(EXPLICIT, P(("slow", "batch")))
    state = jdp.init_state(make, TX, plan, rng=jax.random.key(0))
    assert state.params["w"].sharding.spec == P("batch", None)
    assert "batch=4" in next(p.reason for p in own_plan(EXPLICIT, "zero1").placements(state) if p.path == "params/w")
    with pytest.raises(ValueError, match="slow=2 × batch=4 × accumulate=3 = 24; given 16"):
        jdp.make_train_step(loss, plan, accumulate=3)(state, BATCH)
    with pytest.raises(ValueError, match="slow=2 × batch=4 = 8; given 9"):
        jdp.process_rows(plan, 9)

    def annotated(rng):
        return nnx.Linear(
            32, 64, kernel_init=nnx.with_partitioning(nnx.initializers.ones, ("batch", None)), rngs=nnx.Rngs(rng)
        )

    model = jdp.init(annotated, own_plan(EXPLICIT, "zero3"), rng=jax.random.key(0))
    assert str(jax.typeof(model.kernel[...])) == "float32[32@batch,64]"
    jdp.init_state(make, TX, own_plan(EXPLICIT, "ddp", rules=[("w", P("batch"))]), rng=jax.random.key(0))
    assert any("replicated over batch; take zero1" in record.getMessage() for record in caplog.records)


def test_a_plan_keeps_its_mesh_and_names_when_it_is_changed():
    plan = own_plan(EXPLICIT, "zero1", rules=[("w", P("batch"))])
    changed = replace(plan, strategy="zero3")
    assert changed.home == EXPLICIT and dict(changed.mesh.shape) == {"replica": 2, "data": 4}
    assert replace(changed, strategy="zero1") == plan and plan.on(EXPLICIT) is plan and plan.on(plan.mesh) is plan
    fewer = jax.make_mesh((4,), ("batch",), devices=DEVICES[:4])
    assert plan.on(fewer).home == fewer and plan.on(fewer).batch_shards == 4
    described = plan.on(jdp.make_mesh(data=2, devices=DEVICES[:2]))
    assert str(described).startswith("zero1 on data=2 ") and described.rules == (("w", P("data")),)


@pytest.mark.parametrize(
    ("axes", "names", "message"),
    [
        (("rows",), {}, r"needs a mesh with a `data` axis; given axes \('rows',\).*data=\"batch\""),
        (("rows",), {"data": "batch"}, r"`data` is the name of .*; given 'batch', given axes \('rows',\)"),
        (("batch",), {"data": "batch", "replica": "batch"}, "two axes of the mesh; given 'batch' for both"),
        (("batch",), {"data": "batch", "replica": "slow"}, "axis over slow links; given 'slow'"),
        (("batch", "data"), {"data": "batch"}, "`data` is what jdp calls the axis 'batch'"),
    ],
    ids=str,
)
def test_names_that_a_mesh_lacks_are_refused(axes, names, message):
    mesh = jax.make_mesh((8,) if len(axes) == 1 else (4, 2), axes, devices=DEVICES)
    with pytest.raises(ValueError, match=message):
        jdp.Plan(mesh, **names)


def test_rules_name_axes_as_the_mesh_does():
    with pytest.raises(ValueError, match=r"axes of the mesh only, \('slow', 'batch'\); the rule for 'w' names 'data'"):
        own_plan(EXPLICIT, "zero1", rules=[("w", P("data"))])
    with pytest.raises(ValueError, match=r"The `slow` axis carries the batch only.*Use `batch`"):
        own_plan(EXPLICIT, "zero1", rules=[("w", P("slow"))])
