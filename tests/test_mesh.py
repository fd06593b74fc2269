"""Meshes: the order of axes and devices, what -1 stands for, and errors that show the whole equation."""

import re

import jax
import pytest
from jax.sharding import AxisType

import jdp
from jdp.mesh import batch_axes


def ids(mesh):
    return [device.id for device in mesh.devices.flat]


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ({}, {"data": 8}),
        ({"data": -1}, {"data": 8}),
        ({"replica": 2, "data": 4}, {"replica": 2, "data": 4}),
        ({"data": 4, "model": 2}, {"data": 4, "model": 2}),
        ({"model": 2, "data": 4}, {"model": 2, "data": 4}),
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


def test_the_last_axis_gets_neighbours():
    mesh = jdp.make_mesh(replica=2, data=4)
    assert [device.id for device in mesh.devices[0]] == [0, 1, 2, 3]
    assert [device.id for device in mesh.devices[:, 0]] == [0, 4]


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
def test_the_batch_lies_over_replica_and_data_only(axes, expected):
    assert batch_axes(jdp.make_mesh(**axes)) == expected


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"model": 8}, "A mesh needs a `data` axis; got model=8. Add data=-1 to take the devices that are left."),
        ({"data": 0}, "positive sizes, at most one of them -1 (what is left); got data=0."),
        ({"data": 4, "model": -2}, "positive sizes, at most one of them -1 (what is left); got data=4 × model=-2."),
        ({"data": -1, "model": -1}, "at most one of them -1 (what is left); got data=-1 × model=-1."),
        (
            {"replica": 2, "data": 3},
            "multiply to the number of devices: replica=2 × data=3 = 6, but there are 8 devices. "
            "Change an axis, or run on 6 devices (on CPU: --devices 6).",
        ),
        ({"data": -1, "model": 3}, "data=-1 × model=3 (the others make 3), but there are 8 devices."),
        ({"data": -1, "model": 16}, "data=-1 × model=16 (the others make 16), but there are 8 devices."),
        ({"data": 16}, "data=16 = 16, but there are 8 devices."),
    ],
)
def test_what_is_wrong_with_a_mesh_is_said_with_the_whole_equation(axes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        jdp.make_mesh(**axes)


def test_a_mesh_needs_devices():
    with pytest.raises(ValueError, match="there are 0 devices"):
        jdp.make_mesh(devices=[])
