"""What `jdp.foresight` does in processes of its own."""

import pytest
from own_process import python

from jdp.foresight.targets import resolve as targets

needs_no_driver = pytest.mark.skipif(targets._has_driver(), reason="about machines without an NVIDIA driver")


@needs_no_driver
@pytest.mark.parametrize("first", ["pass", "jax.devices()"], ids=["alone", "after the plugin failed"])
def test_without_jax_platforms_a_target_works(first, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    code = f"""
import os, jax
from jdp.foresight.targets.resolve import target
{first}
before = dict(os.environ)
try:
    print(len(target("h100:1x8").devices))
except ValueError as error:
    print(error)
assert os.environ == before and jax.default_backend() == "cpu"
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    expected = "8" if first == "pass" else "Start the process with JAX_PLATFORMS=cpu"
    assert expected in done.stdout
