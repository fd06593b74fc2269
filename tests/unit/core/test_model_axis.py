"""An axis of the model's own, data=4 × model=2: who says what it shards, that training equals one device's, and that
the contract along `data` holds on a real target, the axis' own traffic counted apart."""

import functools
import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from described_gpus import WITHOUT_TRITON
from flax import nnx
from jax.sharding import PartitionSpec as P
from judged import judged
from plain_layers import init_layers, layers_loss, tokens_of
from trainings import abstract_step, plan_of, train

import jdp
from jdp.foresight.targets.resolve import target

SIZES = {"data": 4, "model": 2}
ADAM = optax.adam(1e-2)
PLAIN = [("layers/up", P(None, None, "model")), ("layers/down", P(None, "model", None)), ("embed", P("model", None))]
"""Rules after Megatron-LM (arXiv:1909.08053, section 3): columns in, rows out; the vocabulary of the embedding."""


class Feed(nnx.Module):
    """Two kernels and a bias that say how they lie, and an array that is a plain attribute."""

    def __init__(self, rngs, names=(None, "model")):
        into = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
        self.up = nnx.Linear(16, 32, kernel_init=into, rngs=rngs)
        self.down = nnx.Linear(32, 16, kernel_init=nnx.with_partitioning(nnx.initializers.lecun_normal(), names[::-1]),
                               rngs=rngs)  # fmt: skip
        self.offset, self.shift = nnx.Param(jnp.zeros((32,)), out_sharding=names[1:]), jnp.zeros(16)

    def __call__(self, x):
        return x + self.shift + self.down(jax.nn.relu(self.up(x) + self.offset[...]))


def stacked(metadata):
    """Three layers in one module: by a plain vmap, or by nnx' with metadata for the dimension of the layers."""

    class Stack(nnx.Module):
        def __init__(self, rngs):
            if metadata is None:
                self.layers = jax.vmap(lambda key: Feed(nnx.Rngs(key)))(jax.random.split(rngs.params(), 3))
            else:
                make = nnx.vmap(lambda rngs: Feed(rngs), in_axes=0, out_axes=0, transform_metadata=metadata)
                self.layers = nnx.split_rngs(splits=3)(make)(rngs)

        def __call__(self, x):
            return jdp.scan_layers(lambda layer, x: layer(x), self.layers, x)

    return lambda rng: Stack(nnx.Rngs(rng))


NAMED = {nnx.PARTITION_NAME: "layers"}


def places_of(init, sizes=SIZES, rules=()):
    plan = plan_of("zero3", math.prod(sizes.values()), **sizes, rules=rules, min_shard_size=16)
    state = jdp.abstract_state(init, optax.adam(1e-3), plan, rng=jax.random.key(0))
    return {place.path: place for place in plan.placements(state)}


def test_metadata_is_a_compute_spec():
    places = places_of(lambda rng: Feed(nnx.Rngs(rng)))
    up, down, offset = (places[f"params/{name}"] for name in ("up/kernel", "down/kernel", "offset"))
    assert (up.compute, up.rest) == (P(None, "model"), P("data", "model"))
    assert (down.compute, down.rest) == (P("model", None), P("model", "data"))
    assert (offset.compute, offset.rest) == (P("model"), P(("model", "data")))
    assert places["params/up/bias"].compute == P()  # it says nothing
    assert places["opt_state/0/mu/up/kernel"].rest == P("data", "model")


@pytest.mark.parametrize("metadata", [None, {}, NAMED], ids=["jax.vmap", "nnx.vmap", "named"])
def test_stacked_layers_keep_their_metadata(metadata):
    """A plain vmap leaves one layer's metadata behind: it holds for the last dimensions. With a PARTITION_NAME Flax
    puts the layers' name in front, which the mesh lacks."""
    places = places_of(stacked(metadata))
    up, offset = places["params/layers/up/kernel"], places["params/layers/offset"]
    assert up.shape == (3, 16, 32) and places["model_state/layers/shift"].shape == (3, 16)
    assert (up.compute, up.rest) == (P(None, None, "model"), P(None, "data", "model"))
    assert offset.compute == P(None, "model")
    assert not any("layers" in str(place.compute) for place in places.values())


def test_rules_go_before_metadata():
    places = places_of(lambda rng: Feed(nnx.Rngs(rng)), rules=[("up/kernel", P("model", None)), ("down/*", P())])
    assert places["params/up/kernel"].compute == P("model", None)
    assert places["params/down/kernel"].compute == P()
    assert places["params/offset"].compute == P("model")


def test_linen_boxes_are_metadata_too():
    """The loss gets plain arrays; what the boxes ask for is in the plan."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
            logical = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("mlp", None))
            x = nn.relu(nn.Dense(32, kernel_init=init)(x))
            return nn.Dense(16, kernel_init=logical)(x)

    net = Net()
    init = lambda rng: net.init(rng, jnp.ones((1, 16)))["params"]  # noqa: E731
    with nn.logical_axis_rules([("mlp", "model")]):
        places = places_of(init)
        assert places["params/Dense_0/kernel"].compute == P(None, "model")
        assert places["params/Dense_1/kernel"].compute == P("model", None)
        state = jdp.init_state(init, ADAM, plan_of("zero1", **SIZES), rng=jax.random.key(0))
    assert all(isinstance(leaf, jax.Array) for leaf in state.params["Dense_0"].values())
    assert state.params["Dense_0"]["kernel"].sharding.spec == P("data", "model")


def test_self_sharding_models_equal_one_device():
    """Metadata on stacked layers through scan_layers, ZeRO-3 on top."""
    loss = lambda model, batch, rng: jdp.Loss(jnp.square(model(batch["x"])).sum(), len(batch["x"]))  # noqa: E731
    batches = [{"x": np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)}] * 3
    ends = []
    for plan in (plan_of("zero3", **SIZES, min_shard_size=16), plan_of("ddp", 1)):
        _, state, measured = train(loss, stacked(NAMED), ADAM, plan, batches, partitioning="auto")
        ends.append((state.params, [float(metrics["loss"]) for metrics in measured]))
    (params, found), (_, expected) = ends
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # float32 sums in another order, three steps
    assert params["layers"]["up"]["kernel"].sharding.spec == P(None, "data", "model")


@pytest.mark.parametrize(
    ("names", "sizes", "message"),
    [
        ((None, "model"), {"data": 1, "model": 5}, "must shard dimensions that divide: dimension 0 of down/"),
        (("model", "model"), SIZES, f"names an axis once; {P('model', 'model')} for"),
    ],
)
def test_unfit_metadata_is_one_clear_error(names, sizes, message):
    with pytest.raises(ValueError, match=re.escape(f"The model's metadata {message}")):
        places_of(lambda rng: Feed(nnx.Rngs(rng), names), sizes)


def report_of(strategy, tokens, axes, rules=(), **sizes):
    """The report of a step for 64 H100 in 8 hosts, with SGD and without Triton: what is sent depends on neither."""
    plan = jdp.Plan(jdp.make_mesh(devices=target("h100:8x8").devices, **axes), strategy, rules=rules)
    init = functools.partial(init_layers, layers=4, vocabulary=512, **sizes)
    loss, settings = functools.partial(layers_loss, remat="full"), {"accumulate": 4, "precision": "bf16"}
    step, state = abstract_step(loss, init, optax.sgd(1e-3), plan, compiler=WITHOUT_TRITON, **settings)
    report = judged(step, state, tokens_of(tokens, 64))
    assert report.kept, str(report)
    return report


@pytest.mark.aot
def test_the_models_own_traffic_is_counted_apart():
    """For 64 H100 in 8 hosts, `model` on a host's links, after Megatron's rules. Its all-reduces of activations along
    `model`, two a layer and one more of each that remat repeats, are reported and marked, and not counted towards the
    contract, which they would break by far."""
    report = report_of("zero2", 64, {"data": 8, "model": 8}, PLAIN, width=512, hidden=6 * 512)  # a GPT's parameters
    assert 0.98 <= report.ratio <= 1.02, str(report)
    sharded = 0.9 * 12 * 512 * 512 * 4 / 8  # most of Ψ is what a device computes with of it
    assert sharded < report.theory.parameters < 1.6 * sharded
    assert [row.kind for row in report.model_axes] == ["all-reduce"]
    apart = [s for s in report.collectives if not s.over_batch]
    assert {s.axes for s in apart} == {("model",)}
    assert sum(s.collective.wire_bytes for s in apart) == report.model_axes[0].wire_bytes > 0
    assert report.model_axes[0].wire_bytes > 0.1 * report.theory_wire_bytes_per_device
    assert "which the contract leaves to the model" in str(report)
    written = report.to_json()
    assert written["model_axes"][0]["wire_bytes"] == report.model_axes[0].wire_bytes
    assert {tuple(c["axes"]) for c in written["collectives"] if not c["counted"]} == {("model",)}


@pytest.mark.aot
def test_only_shards_of_gradients_cross_the_hosts():
    """For 64 H100 in 8 hosts, one replica a host. Over `replica`, the slow links: one all-reduce a step of a shard
    of the gradients, whatever K is; no gathers."""
    report = report_of("zero1", 512, {"replica": 8, "data": 8}, width=256, hidden=1024)
    assert report.model_axes == ()
    across = [s for s in report.collectives if "replica" in s.axes and s.collective.payload_bytes > 8192]
    assert {s.collective.kind for s in across} == {"all-reduce"}
    assert {s.axes for s in across} == {("replica",)}
    sent = sum(s.collective.payload_bytes * s.collective.count for s in across)
    assert sent == pytest.approx(4 * report.theory.parameters / 8, rel=0.01)
    assert not any(s.in_accumulation_loop for s in across)
