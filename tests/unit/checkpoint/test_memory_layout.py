"""Copies in memory: who keeps which part, for hosts that are only described; and any shards are read from any parts."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

import jdp
from jdp.checkpoint.memory.parts import Grid, assembled, layout, part_numbers
from jdp.foresight.targets.resolve import target_of

HOSTS, PER_HOST = 3, 4


@pytest.fixture(scope="module")
def devices():
    return np.array(target_of(f"h100:{HOSTS}x{PER_HOST}").devices)


def arrays(devices, axes, **specs):
    mesh = Mesh(devices.reshape(tuple(axes.values())), tuple(axes))
    return {
        path: jax.ShapeDtypeStruct((24, 12), np.float32, sharding=NamedSharding(mesh, spec))
        for path, spec in specs.items()
    }


def kept_by(shown, host):
    plan = layout(shown, range(HOSTS), host)
    return {number for _, number, _ in (*plan.own, *plan.kept)}, plan


@pytest.mark.aot
@pytest.mark.parametrize(
    ("axes", "spec", "sent"),
    [
        ({"data": 12}, P("data"), True),  # zero1 to zero3
        ({"data": 12}, P(None, "data"), True),
        ({"data": 12}, P(), False),  # ddp
        ({"replica": 3, "data": 4}, P("data"), False),  # a replica on each host
        ({"data": 3, "model": 4}, P(None, "model"), False),  # a replica of each model's part on each host
        ({"data": 6, "model": 2}, P("data", "model"), True),
    ],
)
def test_any_one_host_may_be_lost(devices, axes, spec, sent):
    shown = arrays(devices, axes, w=spec, small=P())
    kept = [kept_by(shown, host) for host in range(HOSTS)]
    plan = kept[0][1]
    assert ("w" in plan.sent, "small" in plan.sent) == (sent, False)
    for lost in range(HOSTS):
        left = set().union(*(parts for host, (parts, _) in enumerate(kept) if host != lost))
        assert left == set(range(plan.total))
    state = 24 * 12 * 4
    sharded = 2 * state // HOSTS if sent else state
    assert plan.host_bytes == sharded + state, "the parts of this host and of the one before; all of the small one"


@pytest.mark.aot
def test_nothing_is_sent_on_one_host(devices):
    """All devices are on one host."""
    plan = layout(arrays(devices, {"data": 12}, w=P("data")), [0, 0, 0], 0)
    assert not plan.route and not plan.sent and not plan.kept


MESH = jdp.make_mesh(data=4, model=2)
SPECS = [
    PartitionSpec(*spec) for spec in ((), ("data",), (None, ("data", "model")), ("model", "data"), (None, "model"))
]


@pytest.mark.parametrize("saved", SPECS)
def test_any_shards_are_read_from_any_parts(saved):
    x = np.random.default_rng(0).normal(size=(8, 16, 6)).astype(np.float32)
    x = jax.device_put(x, NamedSharding(MESH, saved))
    grid = Grid("float32", x.shape, x.sharding.shard_shape(x.shape), 7)
    parts = {grid.number(each.index): np.asarray(each.data).reshape(-1).view(np.uint8) for each in x.addressable_shards}
    for spec in SPECS:
        onto = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(MESH, spec))
        read = assembled(grid, onto, {number: parts[number] for number in part_numbers(grid, onto)})
        assert read.sharding == onto.sharding
        np.testing.assert_array_equal(read, x)
