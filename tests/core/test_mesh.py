"""Meshes: the order of axes and devices, what -1 stands for, and errors that show the whole equation."""

import re

import jax
import pytest
from jax.sharding import AxisType

import jdp
from jdp.core.sharding.mesh import better_order, hosts_along, replicas_for_hosts
from jdp.core.sharding.traced_mesh import batch_axes
from jdp.foresight.targets.resolve import target


def ids(mesh):
    return [device.id for device in mesh.devices.flat]


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ({}, {"data": 8}),
        ({"replica": 2, "data": 4}, {"replica": 2, "data": 4}),
        ({"data": 4, "model": 2}, {"data": 4, "model": 2}),
        ({"replica": -1, "data": 2, "model": 2}, {"replica": 2, "data": 2, "model": 2}),
        ({"data": -1, "model": 8}, {"data": 1, "model": 8}),
        ({"pipe": 2, "data": -1, "model": 2}, {"pipe": 2, "data": 2, "model": 2}),
    ],
)
def test_axes_stand_as_written_and_minus_one_takes_what_is_left(axes, shape):
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


# Hosts: those of a described target, where a device's process is its host.

HOSTS = {"host": lambda device: device.process_index}


def described(name, **axes):
    return jdp.make_mesh(devices=target(name).devices, **axes)


def test_devices_of_a_host_stay_together():
    """Given round robin, the two hosts' devices: each host's four make one replica."""
    devices = target("h100:2x4").devices
    shuffled = [devices[4 * (i % 2) + i // 2] for i in range(8)]
    mesh = jdp.make_mesh(devices=shuffled, data=4, replica=2)
    assert hosts_along(mesh, "data", **HOSTS) == 1
    assert hosts_along(mesh, "replica", **HOSTS) == 2


@pytest.mark.parametrize(
    ("axes", "advice"),
    [
        ({"data": 8, "model": 8}, None),
        ({"model": 8, "data": 8}, "model=8 spans 8 hosts of 8 devices and would fit on the fast links of one"),
        ({"model": 8, "data": 8}, "write it last, make_mesh(data=8, model=8)"),
        ({"data": 4, "model": 16}, None),  # fits on no host
        ({"model": 4, "data": 8, "expert": 2}, "make_mesh(data=8, expert=2, model=4)"),
        ({"model": 4, "data": 4, "expert": 4}, None),  # only one of them fits
        ({"replica": 8, "model": 4, "data": 2}, None),  # both lie on a host
    ],
)
def test_an_order_that_takes_the_models_axis_off_its_host_is_reported(axes, advice):
    message = better_order(described("h100:8x8", **axes), **HOSTS)
    assert message is None if advice is None else advice in message


@pytest.mark.parametrize(
    ("axes", "replicas"),
    [
        ({"data": 64}, 8),
        ({"data": 32, "model": 2}, 8),
        ({"replica": 2, "data": 32}, 4),
        ({"replica": 8, "data": 8}, None),
        ({"data": 8, "model": 8}, None),  # the model's axis takes the host: nothing is left for data
    ],
)
def test_how_many_replicas_keep_data_on_a_host(axes, replicas):
    assert replicas_for_hosts(described("h100:8x8", **axes), **HOSTS) == replicas


def test_devices_keep_the_order_given():
    assert ids(jdp.make_mesh(devices=jax.devices()[::-1])) == list(range(7, -1, -1))
    some = jax.devices()[2:6]
    mesh = jdp.make_mesh(devices=some, data=2, model=-1)
    assert mesh.shape == {"data": 2, "model": 2} and ids(mesh) == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"data": 8}, ("data",)),
        ({"replica": 2, "data": 4}, ("replica", "data")),
        ({"data": 4, "replica": 2}, ("replica", "data")),  # outermost first, however the mesh is written
        ({"model": 2, "data": 4}, ("data",)),
    ],
)
def test_the_batch_is_sharded_over_replica_and_data_only(axes, expected):
    assert batch_axes(jdp.make_mesh(**axes)) == expected


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"model": 8}, "A mesh needs a `data` axis; given model=8. Add data=-1 to take the devices that are left."),
        ({"data": 8, "la la": 1}, "named like variables, and not `devices`; given 'la la'. Rename it."),
        ({"data": 0}, "positive sizes, at most one of them -1 (what is left); given data=0. Write 1 or more"),
        ({"data": -1, "model": -1}, "at most one of them -1 (what is left); given data=-1 × model=-1."),
        (
            {"replica": 2, "data": 3},
            "multiply to the number of devices: replica=2 × data=3 = 6, but there are 8 devices. "
            "Take data=4, or change an axis, or run on 6 devices (devices=jax.devices()[:6]).",
        ),
        (
            {"data": -1, "model": 3},
            "data=-1 × model=3 (the others make 3), but there are 8 devices. "
            "Change an axis, or run on 3 devices or a multiple of them (devices=jax.devices()[:3]).",
        ),
        (
            {"data": 16},
            "devices: data=16, but there are 8 devices. Take data=8, or change an axis, or run on 16 devices, by "
            'jax.config.update("jax_num_cpu_devices", 16) before the first use of jax.',
        ),
    ],
)
def test_what_is_wrong_with_a_mesh_is_reported_with_the_whole_equation(axes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        jdp.make_mesh(**axes)
