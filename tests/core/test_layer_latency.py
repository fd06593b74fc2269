import jax
import pytest

import jdp
from jdp.core.gradients.layer_latency import hides_collectives
from jdp.foresight.targets.resolve import target

LAYER = 12 * 768**2  # of GPT-2 124M


@pytest.mark.aot
@pytest.mark.parametrize(
    ("devices", "axes", "tokens", "by_layer"),
    [
        ("h100:1x8", {}, 2048, True),
        ("h100:8x8", {}, 2048, False),
        ("h100:8x8", {}, 16384, True),
        ("h100:64x8", {}, 16384, False),
        ("h100:64x8", {"replica": 64}, 2048, False),
        ("h100:64x8", {"replica": 64}, 16384, True),
    ],
)
def test_short_layers_share_their_collectives(devices, axes, tokens, by_layer):
    """As compiled and simulated under zero1: the cases of the module's docstring, and hosts as replicas."""
    mesh = jdp.make_mesh(**axes, data=-1, devices=target(devices).devices)
    assert hides_collectives(6 * LAYER * tokens, LAYER, 2, mesh, is_sharded=True) == by_layer


def test_unknown_devices_send_by_layer():
    assert hides_collectives(1.0, LAYER, 2, jdp.make_mesh(devices=jax.devices()), is_sharded=True)
