"""Meshes: the order of axes and devices, an axis of -1, and errors that show the whole equation."""

import re

import jax
import pytest
from jax.sharding import AxisType

import jdp
from jdp.foresight.targets.resolve import target


def ids(mesh):
    return [device.id for device in mesh.devices.flat]


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ({}, {"data": 8}),
        ({"replica": 2, "data": 4}, {"replica": 2, "data": 4}),
        ({"replica": -1, "data": 2, "model": 2}, {"replica": 2, "data": 2, "model": 2}),
        ({"pipe": 2, "data": -1, "model": 2}, {"pipe": 2, "data": 2, "model": 2}),
    ],
)
def test_minus_one_takes_the_remaining_devices(axes, shape):
    mesh = jdp.make_mesh(**axes)
    assert list(mesh.shape.items()) == list(shape.items())
    assert ids(mesh) == [device.id for device in jax.devices()]  # row-major: the last axis varies fastest
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize("axes", [{"data": 2, "replica": 2, "model": 2}, {"replica": 2, "data": 2, "model": 2}])
def test_replica_varies_slowest_wherever_it_is_written(axes):
    """Names stand as written; but devices 0-3 are one replica, and the last of the other axes has neighbours."""
    mesh = jdp.make_mesh(**axes)
    assert mesh.axis_names == tuple(axes)
    for replica in (0, 1):
        part = mesh.devices.take(replica, axis=mesh.axis_names.index("replica"))  # [data, model]
        assert [[device.id for device in row] for row in part] == [
            [4 * replica, 4 * replica + 1],
            [4 * replica + 2, 4 * replica + 3],
        ]


@pytest.mark.aot
def test_devices_of_a_host_stay_together():
    """Given round robin, the two hosts' devices: each host's four make one replica."""
    devices = target("h100:2x4").devices
    shuffled = [devices[4 * (i % 2) + i // 2] for i in range(8)]
    mesh = jdp.make_mesh(devices=shuffled, data=4, replica=2)
    hosts = [{device.process_index for device in replica} for replica in mesh.devices.T]
    assert hosts == [{0}, {1}]


def test_devices_keep_the_order_given():
    assert ids(jdp.make_mesh(devices=jax.devices()[::-1])) == list(range(7, -1, -1))
    some = jax.devices()[2:6]
    mesh = jdp.make_mesh(devices=some, data=2, model=-1)
    assert mesh.shape == {"data": 2, "model": 2} and ids(mesh) == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"model": 8}, "A mesh needs a `data` axis; given model=8. Add data=-1 for the remaining devices."),
        ({"data": 8, "la la": 1}, "named like variables, and not `devices`; given 'la la'. Rename it."),
        ({"data": 0}, "positive sizes, and one may be -1 (the rest); given data=0. Write 1 or more"),
        (
            {"replica": 2, "data": 3},
            "multiply to the number of devices: replica=2 × data=3 = 6, but there are 8 devices. "
            'Take data=4, or change an axis, or run on 6 devices, by jax.config.update("jax_num_cpu_devices", 6)',
        ),
        (
            {"data": -1, "model": 3},
            "data=-1 × model=3 (the others make 3), but there are 8 devices. "
            "Change an axis, or run on 3 devices or a multiple of them, by jax.config.update",
        ),
    ],
)
def test_a_wrong_mesh_is_reported_as_an_equation(axes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        jdp.make_mesh(**axes)
