"""Where every leaf of a train state lives, why, and how many bytes of it a device holds."""

import logging
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from trainings import plan_of

import jdp
from jdp.base import notices
from jdp.core.init.train_state import report_placements
from jdp.core.sharding.placement import rest_spec
from jdp.core.sharding.strategy import STRATEGIES


def abstract(plan, shapes, tx=None):
    """An abstract state with parameters of the given shapes: {name: shape}, nested."""
    tx = optax.adam(1e-3) if tx is None else tx
    init = lambda rng: jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))  # noqa: E731
    return jdp.abstract_state(init, tx, plan, rng=jax.random.key(0))


def by_path(plan, state):
    return {place.path: place for place in plan.placements(state)}


@pytest.mark.parametrize(
    ("shape", "compute", "axes", "expected", "reason"),
    [
        ((256, 512), P(), {"data": 8}, P(None, "data"), "sharded on dimension 1: 512 over data=8"),
        ((256, 256), P(), {"data": 8}, P("data"), "dimension 0"),  # the first of equals
        ((100, 64), P(), {"data": 8}, P(None, "data"), "dimension 1"),  # the largest does not divide
        ((64, 32, 32), P(), {"data": 8}, P(None, "data"), "dimension 1"),  # perhaps stacked layers: leading dim last
        ((64, 3, 33), P(), {"data": 8}, P("data"), "dimension 0"),  # ... but better than not at all
        ((1024,), P(), {"data": 8}, P("data"), "dimension 0"),  # min_shard_size itself is not too small
        ((1023,), P(), {"data": 8}, P(), "replicated: 1023 elements, fewer than min_shard_size=1024"),
        ((33, 101), P(), {"data": 8}, P(), "replicated: no dimension of [33, 101] divides by data=8"),
        ((256, 512), P(), {"data": 1}, P(), "the data axis has one device"),
        ((), P(), {"data": 8}, P(), "replicated: 1 elements"),
        ((0, 2048), P(), {"data": 8}, P(), "replicated: no elements"),  # a gather of nothing has no shape to infer
        # The model's own axes: an untouched dimension first, though it is smaller; else the rest of a taken one.
        ((64, 512), P(None, "model"), {"data": 4, "model": 2}, P("data", "model"), "dimension 0"),
        ((63, 512), P(None, "model"), {"data": 4, "model": 2}, P(None, ("model", "data")), "dimension 1"),
        ((63, 516), P(None, "model"), {"data": 4, "model": 2}, P(None, "model"), "no dimension"),  # 516 / 2 / 4: no
        ((512, 64), P("model"), {"data": 4, "model": 2}, P("model", "data"), "dimension 1"),
    ],
)
def test_the_rest_spec(shape, compute, axes, expected, reason):
    spec, why = rest_spec(shape, compute, axes, 1024)
    assert spec == expected
    assert reason in why


MODEL_MESH = {"data": 4, "model": 2}


@pytest.mark.parametrize(
    ("strategy", "rules", "rest", "compute"),
    [
        ("zero3", [("*w", P(None, "model"))], P("data", "model"), P(None, "model")),
        ("ddp", [("*w", P(None, "model"))], P(None, "model"), P(None, "model")),
        ("zero3", [("a/b/w", P("data"))], P("data"), P()),  # naming `data` pins the dimension
        ("zero3", [("*w", P("data", "model"))], P("data", "model"), P(None, "model")),
        ("zero3", [("*w", P(None, ("model", "data")))], P(None, ("model", "data")), P(None, "model")),
        ("zero3", [("*w", P(None, ("data", "model")))], P(None, ("model", "data")), P(None, "model")),
        ("ddp", [("*w", P("data", "model"))], P(None, "model"), P(None, "model")),
        ("zero1", [("a/*/w", P("model")), ("*w", P(None, "model"))], P("model", "data"), P("model")),  # first match
        ("zero1", [("a/*", P("model"))], P("model", "data"), P("model")),  # `*` matches slashes too
    ],
)
def test_rules_give_the_compute_spec(strategy, rules, rest, compute):
    plan = jdp.Plan(jdp.make_mesh(**MODEL_MESH), strategy, rules=rules)
    state = abstract(plan, {"a": {"b": {"w": (64, 512)}}})
    for path in ("params/a/b/w", "opt_state/0/mu/a/b/w"):
        place = by_path(plan, state)[path]
        for spec, wanted in ((place.rest, rest), (place.compute, compute)):
            assert NamedSharding(plan.mesh, spec).is_equivalent_to(NamedSharding(plan.mesh, wanted), 2)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([("*", P("tensor"))], "over the axes ('data', 'model'); the rule for '*' has 'tensor'."),
        ([("*", P(None, ("replica", "data")))], "the rule for '*' has ('replica', 'data')."),  # it shards the batch
        ([("*bias", P("model"))], "Every rule must match a parameter; '*bias' matches none of a/w."),
        ([("*", P(None, None, "model"))], "of the rule for '*' has 3, and a/w has shape [63, 12]."),
        ([("*", P("model"))], f"dimension 0 of a/w [63, 12] is 63, and {P('model')} splits it into 2."),
        ([("*", P(None, ("model", "data")))], "dimension 1 of a/w [63, 12] is 12, and"),
    ],
)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_rule_that_does_not_fit_is_refused(rules, message, strategy):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan = jdp.Plan(jdp.make_mesh(**MODEL_MESH), strategy, rules=rules)
        abstract(plan, {"a": {"w": (63, 12)}})


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        *(("zro3", "did you mean zero3?"), ("quux", "Choose one of these.")),
        *((word, "; here that is zero3") for word in ("FULL_SHARD", "zero_3", "DeepSpeed stage 3", 3)),
        *(("hsdp", "; here that is zero3, with a replica axis in the mesh"), ("no_shard", "; here that is ddp")),
        *(("SHARD_GRAD_OP", "; here that is zero2"), ("zero", "; here that is zero1, zero2 or zero3, by its stage")),
    ],
)
def test_a_misspelt_strategy_is_offered_the_nearest(word, hint):
    with pytest.raises(ValueError, match=re.escape("one of ddp, zero1, zero2, zero3; given")) as error:
        jdp.Plan(jdp.make_mesh(), word)
    assert str(error.value).endswith(hint)


def test_a_plan_needs_an_auto_data_axis():
    line = re.escape("Write jdp.make_mesh, or jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,) * 1)")
    for name, kind in (("model", AxisType.Auto), ("data", AxisType.Explicit), ("data", AxisType.Manual)):
        with pytest.raises(ValueError, match=line):
            jdp.Plan(jax.make_mesh((8,), (name,), axis_types=(kind,)))


# The twins differ in their paths alone, and their rules pin different dimensions.
TWINS = {"w": (64, 64), "inner": {"w": (64, 64)}, "b": (64,)}
LABELS = {"w": 1, "inner": {"w": 1}, "b": 2}
TWIN_RULES = [("w", P("data")), ("inner/w", P(None, "data"))]
MIRRORS = {
    "chain": (lambda: optax.chain(optax.clip(1.0), optax.adamw(optax.linear_schedule(1.0, 0.0, 9))), 2),
    "inject_hyperparams": (lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=0.1), 2),
    "MultiSteps": (lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), 3),
    "multi_transform": (lambda: optax.multi_transform({1: optax.adam(0.1), 2: optax.sgd(0.1, 0.9)}, LABELS), 2),
    "masked": (lambda: optax.masked(optax.adam(0.1), {"w": True, "inner": {"w": True}, "b": False}), 2),
    "apply_if_finite": (lambda: optax.apply_if_finite(optax.lion(0.1), 3), 1),
}


@pytest.mark.parametrize("name", MIRRORS)
def test_optimizer_state_mirrors_parameters_by_path_through_wrappers(name):
    make, copies = MIRRORS[name]
    plan = jdp.Plan(jdp.make_mesh(), "zero1", rules=TWIN_RULES)
    state = abstract(plan, TWINS, make())
    leaves = [place for place in plan.placements(state) if place.path.startswith("opt_state/")]
    twins = [place for place in leaves if place.shape == (64, 64)]
    assert len(twins) == 2 * copies
    for place in twins:
        assert place.rest == (P(None, "data") if "/inner/" in place.path else P("data")), place.path
    assert all(place.rest == P() for place in leaves if place not in twins)


SHAPES = {"w": (16, 96), "stacked": (3, 24, 16), "small": (40,), "odd": (33, 35)}
MESHES = {
    "data=8": ({"data": 8}, ()),
    "replica=2,data=4": ({"replica": 2, "data": 4}, ()),
    "data=4,model=2": ({"data": 4, "model": 2}, (("w", P(None, "model")),)),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mesh", MESHES)
def test_the_bytes_foreseen_are_the_bytes_held(mesh, strategy):
    axes, rules = MESHES[mesh]
    plan = plan_of(strategy, **axes, rules=rules, min_shard_size=100)
    init = lambda rng: {name: jnp.zeros(shape) for name, shape in SHAPES.items()}  # noqa: E731
    state = jdp.init_state(init, optax.adam(1e-3), plan, rng=jax.random.key(0))
    places, held = plan.placements(state), dict.fromkeys(jax.devices(), 0)
    for place, leaf in zip(places, jax.tree.leaves(state), strict=True):
        words = jax.random.key_data(leaf) if place.path == "rng" else leaf
        for shard in words.addressable_shards:
            assert shard.data.nbytes == place.bytes_per_device, place.path
            held[shard.device] += shard.data.nbytes
    assert set(held.values()) == {sum(place.bytes_per_device for place in places)}

    # fp32 Adam: 12 bytes a parameter, whole or cut by the data axis, and the model's axis where it has a rule.
    data, scalars = 1 if strategy == "ddp" else axes["data"], 3 * 4 + 8
    sizes = {name: math.prod(shape) for name, shape in SHAPES.items()}
    cut = {"w": data * (2 if rules else 1), "stacked": data}
    assert sum(p.bytes_per_device for p in places) == scalars + sum(12 * n // cut.get(k, 1) for k, n in sizes.items())


def test_unsharded_leaves_are_reported_once(reported):
    shapes = {"w": (64, 64), "odd": (33, 101), "b1": (64,), "b2": (64,), "b3": (64,), "b4": (64,)}
    plan = jdp.Plan(jdp.make_mesh(data=4, model=2), "zero2")
    for _ in range(2):
        report_placements(plan, abstract(plan, shapes))
    assert reported() == [
        "no parameter is sharded over model: its devices repeat each other's work, unless the loss divides activations "
        "over model. Name it in Plan's rules, or leave these devices to data",
        "odd [33, 101]: no dimension divides by data=4, so every device holds all, 39.1 KiB with optimizer state, "
        "72.2% of its state",
        "parameters of fewer than 1024 elements stay replicated, 1,024 bytes on every device: b1, b2, b3 and 1 more",
    ]


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"a": (33, 60), "b": (6, 244)}, "a [33, 60] and 1 more: .*; a mesh of replica=2 × data=4 divides"),
        ({"a": (33, 61)}, "a [33, 61]: .* of its state$"),
    ],
)
def test_a_mesh_that_divides_is_named(odd, words, reported):
    for size, is_named in ((1, "mesh" in words), (64, False)):  # next to a larger leaf it is a small share
        plan = jdp.Plan(jdp.make_mesh(), "zero1")
        report_placements(plan, abstract(plan, {**odd, "w": (size * 64, 256)}))
        said = reported()[-1]
        assert bool(re.search("a mesh of", said)) is is_named
        assert size > 1 or re.search(words.replace("[", r"\["), said), said


def test_notices_go_to_standard_error(monkeypatch, fresh_notices, capsys):
    """Once a process, and not if the application has silenced the logger."""
    monkeypatch.setattr(notices.logger, "hasHandlers", lambda: False)
    for text in ("a leaf is replicated", "a leaf is replicated", "and another"):
        notices.notice(text)
    monkeypatch.setattr(notices.logger, "level", logging.ERROR)
    notices.notice("not heard")
    assert capsys.readouterr() == ("", "jdp: a leaf is replicated\njdp: and another\n")
