"""What notebooks and terminals show of plans, states and placements, by IPython's own formatter.

Nothing is read from a device for it: the arrays of the state that is shown are gone.
"""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from IPython.core.formatters import DisplayFormatter
from jax.sharding import PartitionSpec

import jdp

LAYERS = 12
HOSTILE = '<script>alert("x")</script>'


def init(rng):
    return {f"layer{i}": {"kernel": jnp.zeros((64, 64)), "bias": jnp.zeros(64)} for i in range(LAYERS)}


def plan_of(strategy="zero3", **settings):
    return jdp.Plan(jdp.make_mesh(replica=2, data=4), strategy, **settings)


def shown(drawn):
    """What IPython shows of an object: (text, HTML)."""
    data, _ = DisplayFormatter().format(drawn)
    return data["text/plain"], data["text/html"]


@pytest.fixture(scope="module")
def gone():
    """A state whose arrays are gone: nothing of them can be read, and no program can take them."""
    state = jdp.init_state(init, optax.adam(1e-3), plan_of(), rng=jax.random.key(0))
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    return state


def test_a_state_is_shown_as_a_table(gone):
    text = repr(gone)
    lines = text.splitlines()
    assert len(lines) < 40  # for 76 leaves
    assert re.search(r"params/layer0/kernel +float32\[64, 64\] +P\('data',\), donated +4 KiB", text)
    elements = LAYERS * (64 * 64 + 64)
    left = [line for line in lines if "left out" in line]
    assert len(left) == 1 and left[0].startswith("… 52 leaves left out")
    assert re.search(rf"all of params +{elements / 1e3:.3g}k elements in 24 ", text)


def test_placements_are_listed_with_reasons(gone):
    plan = plan_of(offload="optimizer")
    placements = plan.placements(gone)
    assert isinstance(placements, list) and isinstance(placements[0], jdp.Placement)
    moments = [place for place in placements if place.path.startswith("opt_state/0/mu/layer0/")]
    assert repr(moments[1]) == (
        "Placement('opt_state/0/mu/layer0/kernel', float32[64, 64], P('data',) at rest, P() while used, 4 KiB a device "
        "in host memory: mirrors params/layer0/kernel; in host memory)"
    )
    text, html = shown(placements[1:4])
    assert text.splitlines()[0] == "3 placements" and html.startswith("<p>3 placements</p><table><tr><th>leaf</th>")
    assert "<td>sharded on dimension 0: 64 over data=4</td>" in html
    assert "P('data',) in host memory" in repr(placements)
    assert re.search(r"of it in host memory +98\.3k elements in 24 +96 KiB", repr(placements))


def test_a_plan_is_one_line_and_a_table():
    plan = plan_of(rules=[(HOSTILE, PartitionSpec())], min_shard_size=0)
    text, html = shown(plan)
    assert text.replace("\n", "").startswith("Plan(replica=2 × data=4 cpu devices, 'zero3', rules=((")
    assert "min_shard_size=0)" in text
    assert "<td>gathered at each use</td>" in html and "script>" not in html and "&lt;script&gt;" in html
    assert repr(plan_of()) == "Plan(replica=2 × data=4 cpu devices, 'zero3')"
