"""`jdp.foresee` and `jdp.verify` of jitted steps that jdp did not make: NNX, equinox and plain jax."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from judged import source_line

import jdp
from jdp.foresight.program.collectives import collectives, total_wire_bytes
from jdp.foresight.targets.resolve import target

WIDTH, ROWS, LENGTH = 64, 64, 64


def mesh_of(count=4, *, names=("data",), shape=None, first=0, kind=AxisType.Auto):
    devices = np.array(jax.devices()[first : first + count]).reshape(shape or (count,))
    return Mesh(devices, names, axis_types=(kind,) * len(names))


# A plain Flax step, as the NNX sharding guide writes it: metadata on the weights, constraints on the state, nnx.jit.


def linear(rows, columns, rngs):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "data"))
    return nnx.Linear(rows, columns, kernel_init=init, use_bias=False, rngs=rngs)


class Block(nnx.Module):
    """Nothing says where its activations are, unless `constrained`."""

    def __init__(self, rngs, *, constrained):
        init = nnx.with_partitioning(nnx.initializers.normal(), (None, "data"))
        self.embed = nnx.Embed(128, WIDTH, embedding_init=init, rngs=rngs)
        self.up, self.down = linear(WIDTH, 4 * WIDTH, rngs), linear(4 * WIDTH, WIDTH, rngs)
        self.constrained = constrained

    def __call__(self, tokens):
        x = self.embed(tokens)
        if self.constrained:
            x = jax.lax.with_sharding_constraint(x, P("data"))
        hidden = nnx.gelu(self.up(x))
        return x + self.down(hidden)


def guides_step(mesh, *, constrained=False, donate=()):
    @nnx.jit
    def create():
        model = Block(nnx.Rngs(0), constrained=constrained)
        optimizer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)
        state = nnx.state((model, optimizer))
        nnx.update((model, optimizer), jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
        return model, optimizer

    @nnx.jit(donate_argnums=donate)
    def train_step(model, optimizer, tokens):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(tokens) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    with jax.set_mesh(mesh):
        model, optimizer = create()
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32, sharding=NamedSharding(mesh, P("data")))
    return train_step, model, optimizer, tokens


@pytest.mark.aot
def test_the_nnx_guides_activations_are_reported():
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        report = jdp.verify(*guides_step(mesh), target="h100:1x8", against="zero3", params="model")
        kept = jdp.verify(*guides_step(mesh, constrained=True), target="h100:1x8", against="zero3", params="model")
    assert report.mesh == {"data": 8}
    assert not report.kept
    assert report.ratio > 3
    lines = [source_line(Block.__call__, text) for text in ("hidden = nnx", "return x + self.down(hidden)")]
    assert any(line in report.symptoms[0] for line in lines)
    assert "no argument has these shapes" in report.symptoms[0]
    assert any(line in report.breaches[0] for line in lines)
    assert kept.kept
    assert kept.breaches == ()
    assert not any(each.startswith("Activations") for each in kept.symptoms)
    assert all(each.like for each in kept.sent if each.wire_bytes > 1000)
    assert [each.bytes for each in report.memory.arguments if each.path == "model/up/kernel"] == [4 * 4 * WIDTH**2 // 8]
    assert report.headroom.fits
    assert report.timeline.step_seconds > kept.timeline.step_seconds > 0
    text = str(report)
    assert text.startswith("train_step on data=8 for h100:1x8\nBROKEN: a device sends ")
    assert "model/up/kernel" in text
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["kept"] is False


def test_a_report_is_of_the_users_program():
    mesh = mesh_of()
    step, *arguments = guides_step(mesh, donate=(0, 1))
    report = jdp.foresee(step, *arguments)
    compiled = step.lower(*arguments).compile()
    assert report.wire_bytes_per_device == total_wire_bytes(collectives(compiled.compiled.as_text()))
    sizes = compiled.compiled.memory_analysis()
    assert report.memory.temporaries == sizes.temp_size_in_bytes
    assert sum(each.bytes for each in report.memory.arguments) == sizes.argument_size_in_bytes
    assert report.kept is None
    assert {each.path for each in report.memory.arguments if each.donated and each.in_place} >= {"model/up/kernel"}
    assert not any("no argument is donated" in each for each in report.symptoms)
    alone = jdp.foresee(jax.jit(lambda w: w * 2), jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, P("data"))))
    assert any("no argument is donated, so w (4 KiB a device)" in each for each in alone.symptoms)


def test_jdps_gradient_in_a_users_jit():
    """It follows to other sizes, though it is a shard_map."""
    mesh = mesh_of()
    plan = jdp.Plan(mesh, "zero1", min_shard_size=64)

    def loss_fn(params, batch, rng):
        return jdp.Loss(jnp.sum((batch["x"] @ params["w"]) ** 2), jnp.float32(len(batch["x"])))

    gradient = jdp.value_and_grad(loss_fn, plan, partitioning="manual", check_loss=False)

    @jax.jit
    def step(params, batch, rng):
        _, grads = gradient(params, batch, rng)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = jdp.place({"w": jnp.ones((64, 64))}, plan)
    batch = {"x": jax.ShapeDtypeStruct((20, 64), jnp.float32, sharding=plan.batch_sharding)}
    report = jdp.verify(step, params, batch, jax.random.key(0), target="cpu:8", against="zero1", params="params")
    assert report.mesh == {"data": 8}
    assert report.wire_bytes_per_device > 0
    assert "a batch's rows must divide by data=8; given 20: rounded up to 24" in report.notes
    assert report.kept
    again = jdp.verify(step, params, batch, jax.random.key(0))  # nothing of the target is left in jax's caches
    assert (again.target, again.mesh) == ("cpu:4", {"data": 4})


def closing_over(mesh, *, local):
    def summed(x):
        return jax.lax.psum(x, "data")

    @jax.jit
    def step(w, x):
        y = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("data", None)))
        if local:
            y = jax.shard_map(summed, mesh=mesh, in_specs=P("data"), out_specs=P())(y)
        return y.sum()

    array = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))  # noqa: E731
    return step, array((64, 64), P()), array((16, 64), P("data"))


def test_meshes_that_a_step_closed_over_move_too():
    elsewhere = mesh_of(first=4)
    same = jdp.foresee(*closing_over(elsewhere, local=True), target="cpu:4")
    assert [each.wire_bytes for each in same.sent if each.dims == (4, 64)] == [2 * 3 / 4 * 4 * 64 * 4]
    assert jdp.foresee(*closing_over(elsewhere, local=False), target="cpu:8").mesh == {"data": 8}


def test_a_shard_map_over_its_mesh_is_refused():
    with pytest.raises(ValueError, match=r"shard_map over its own mesh .*; given data=4 at .*test_any_step.py:\d+"):
        jdp.foresee(*closing_over(mesh_of(), local=True), target="cpu:8")


def gradient_step(mesh, *, columns=64, rows=20):
    """Arguments: weights, split over `model` where the mesh has it; rows of a batch, split over `data`."""
    step = jax.jit(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w))
    split = P(None, "model" if "model" in mesh.axis_names else None)
    w = jax.ShapeDtypeStruct((64, columns), jnp.float32, sharding=NamedSharding(mesh, split))
    return step, w, jax.ShapeDtypeStruct((rows, 64), jnp.float32, sharding=NamedSharding(mesh, P("data")))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_auto_and_explicit_meshes_move(kind):
    report = jdp.verify(*gradient_step(mesh_of(kind=kind)), target="cpu:8", against="ddp", params="w")
    assert report.mesh == {"data": 8}
    assert report.kept and report.wire_bytes_per_device == 2 * 7 / 8 * 4 * 64 * 64
    assert "a batch's rows must divide by data=8; given 20: rounded up to 24" in report.notes


def test_raised_rows_divide_by_both_meshes():
    report = jdp.foresee(*gradient_step(mesh_of(), rows=16), target="cpu:6")  # 18 divides by 6, but not by 4
    assert "a batch's rows must divide by data=6; given 16: rounded up to 24" in report.notes


def model_step(columns=64):
    return gradient_step(mesh_of(names=("data", "model"), shape=(2, 2)), columns=columns)


@pytest.mark.parametrize(
    ("sizes", "moved"),
    [
        (None, {"data": 4, "model": 2}),
        ({"model": 4}, {"data": 2, "model": 4}),
        ({"data": 1, "model": -1}, {"data": 1, "model": 8}),
    ],
)
def test_the_batchs_axis_takes_the_remaining_devices(sizes, moved):
    report = jdp.foresee(*model_step(), target="cpu:8", mesh=sizes)
    assert report.mesh == moved
    (w,) = (each for each in report.memory.arguments if each.path == "w")
    assert w.bytes == 4 * 64 * 64 // moved["model"]


@pytest.mark.aot
@pytest.mark.parametrize("named", [True, False])
def test_fused_attention_is_traced_for_described_gpus(named):
    """jax asks this machine for its cuDNN while it traces, and the described GPUs of target or arguments answer."""

    def summed(w, x):
        q, k, v = jnp.moveaxis((x @ w).reshape(*x.shape[:2], 3, 4, 64), 2, 0)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return attended.astype(jnp.float32).sum()

    mesh = mesh_of() if named else Mesh(np.array(target("h100:1x8").devices), ("data",))
    w = jax.ShapeDtypeStruct((256, 3 * 256), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
    x = jax.ShapeDtypeStruct((8, 256, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
    report = jdp.foresee(jax.jit(jax.grad(summed)), w, x, target="h100:1x8" if named else None)
    assert report.timeline.parts["attention"] > 0
    assert report.mesh == {"data": 8}


def test_bounds_by_bytes_and_by_parameters():
    step, w, x = closing_over(mesh_of(), local=True)
    assert jdp.verify(step, w, x, against=1e6).kept
    broken = jdp.verify(step, w, x, against=100)
    assert not broken.kept
    assert "of the 100 B that were given" in str(broken)
    assert broken.breaches[0].startswith(f"all-reduce of f32[4, 64], at {source_line(closing_over, 'jax.lax.psum')} ")
    wanted = {
        params: jdp.verify(step, w, x, against="ddp", params=params).bound_wire_bytes_per_device
        for params in (0, "w", "w*")
    }
    assert {*wanted.values()} == {2 * 3 / 4 * 4 * 64 * 64}


BAD = {
    "a function that is not jitted": (
        lambda step, w, x: jdp.verify(lambda w, x: (x @ w).sum() * 2, w, x),
        r"one jitted function; given <lambda>, which runs \d operations one by one",
    ),
    "no mesh": (
        lambda step, w, x: jdp.verify(jax.jit(lambda a: a + 1), np.ones(4)),
        "must be on a mesh; none of these is",
    ),
    "two meshes": (
        lambda step, w, x: jdp.verify(jax.jit(lambda a, b: a.sum() + b.sum()), other_mesh(w), x),
        r"placed on one mesh; given a on data=4 \(.*\) and b on data=4",
    ),
    "an axis that is not there": (
        lambda step, w, x: jdp.verify(step, w, x, target="cpu:8", mesh={"modle": 2}),
        "mesh sets the sizes of .* axes, data, .*; given data=4 × modle=2",
    ),
    "sizes that do not multiply to the devices": (
        lambda step, w, x: jdp.foresee(*model_step(), target="cpu:8", mesh={"model": 3}),
        "given data=2 × model=3 for the 8 devices of cpu:8",
    ),
    "weights that the target cannot split": (
        lambda step, w, x: jdp.foresee(*model_step(columns=6), target="cpu:8", mesh={"model": 4}),
        r"given w \[64, 6\], whose dimension 1 is sharded over model, 4 on the target",
    ),
    "an abstract mesh without a target": (
        lambda step, w, x: jdp.foresee(*gradient_step(AbstractMesh((4,), ("data",)))),
        "given an abstract mesh, which has no devices",
    ),
    "a second mesh inside": (
        lambda step, w, x: jdp.foresee(jax.jit(lambda w, x: on_other_axes(x @ w).sum()), w, x, target="cpu:8"),
        "with axes data; given a second mesh with other inside it",
    ),
    "a strategy without parameters": (
        lambda step, w, x: jdp.verify(step, w, x, against="zero3"),
        "given against='zero3' and no params",
    ),
}


def on_other_axes(x):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh_of(names=("other",), first=4), P("other")))


def other_mesh(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh_of(first=4), array.sharding.spec))


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name):
    call, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        call(*closing_over(mesh_of(), local=False))
