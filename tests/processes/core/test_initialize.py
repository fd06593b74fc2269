"""Joining a cluster: detected if there is one, never by mistake, and never failing in silence."""

import os
import re
import time
from typing import Any

import jax
import pytest

from jdp.core.cluster import initialize as initializing
from jdp.core.cluster.initialize import initialize


@pytest.fixture
def joining(monkeypatch):
    """What `jax.distributed.initialize` was called with."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: seen.update(given))
    monkeypatch.setattr(initializing.RollCall, "call", lambda self, seconds: seen.update(roll=(self, seconds)))
    monkeypatch.setattr(initializing, "wait_for_coordinator", lambda *_: None)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    for name in os.environ:
        if name.startswith(("JDP_", "JAX_COORDINATOR", "SLURM_", "OMPI_")):
            monkeypatch.delenv(name)
    return seen


def test_alone_nothing_happens(joining):
    initialize()
    initialize("127.0.0.1:1", 1, 0)
    assert joining == {}


def test_a_local_coordinator_listens_on_loopback_only(joining):
    initialize("127.0.0.1:5", 2, 1, timeout_seconds=7)
    assert joining["coordinator_bind_address"] == "127.0.0.1:5"
    assert joining["roll"] == (initializing.RollCall("127.0.0.1:5", 1, 2), 7)
    assert (joining["coordinator_address"], joining["num_processes"], joining["process_id"]) == ("127.0.0.1:5", 2, 1)
    assert joining["cluster_detection_method"] == "deactivate"
    assert os.environ["no_grpc_proxy"] == "127.0.0.1"  # noqa: SIM112


@pytest.mark.parametrize("address", ["gpu007:5", "192.0.2.77:5", "[fd00::77]:5"])
def test_another_hosts_coordinator_listens_where_jax_says(address, joining):
    initialize(address, 2, 1)
    assert joining["coordinator_bind_address"] is None
    assert os.environ["no_grpc_proxy"] == address[:-2].strip("[]")  # noqa: SIM112


def test_ignored_mutual_tls_is_refused(joining, monkeypatch):
    monkeypatch.setenv("JAX_MTLS_CERT_FILE", "cert.pem")
    with pytest.raises(ValueError, match=r"needs JAX 0\.12; given JAX_MTLS_CERT_FILE, which JAX .* ignores"):
        initialize("127.0.0.1:5", 2, 1)
    assert joining == {}


def test_jax_detects_its_own_clusters(joining, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "gpu007:5")
    initialize()
    assert joining and "coordinator_address" not in joining and "cluster_detection_method" not in joining


def test_failing_to_join_is_never_swallowed(joining, monkeypatch):
    def fail(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    words = r"part of a cluster \(arguments\) and could not join it: coordinator_address"
    with pytest.raises(RuntimeError, match=words):
        initialize("127.0.0.1:1", 2, 0)


def test_joining_another_cluster_is_refused(joining, monkeypatch):
    monkeypatch.setattr(initializing, "joined_as", lambda: (1, 2))
    initialize("127.0.0.1:1", 2, 1)
    assert joining == {}
    with pytest.raises(ValueError, match="already joined a cluster as number 1 of 2"):
        initialize("127.0.0.1:1", 3, 1)


JOIN = """
import jax, jax.numpy as jnp, numpy as np, sys, time
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jdp.core.cluster import initialize as joining
joining.initialize(timeout_seconds=60)
joining.initialize()
"""


def test_two_processes_sum_over_four_devices(together):
    """And may end one after the other."""
    code, out, err = together(
        JOIN
        + """
mesh = Mesh(jax.devices(), "data")
whole = np.arange(1, 5, dtype=np.float32)
x = jax.make_array_from_callback((4,), NamedSharding(mesh, P("data")), lambda index: whole[index])
total = jax.jit(jax.shard_map(lambda part: jax.lax.psum(part, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()))(x)
print("joined", joining.joined_as(), jax.process_index(), jax.local_device_count(), float(total[0]), flush=True)
time.sleep(1.5 * jax.process_index())
"""
    )
    assert (code, err) == (0, "")
    assert "[0] joined (0, 2) 0 2 10.0\n" in out and "[1] joined (1, 2) 1 2 10.0\n" in out


HOOK = """
def mine(kind, error, trace):
    print("my own hook saw", kind.__name__, flush=True)
    before(kind, error, trace)
before, sys.excepthook = sys.excepthook, mine
"""
WAIT_FOR_EACH_OTHER = """
mesh = Mesh(jax.devices(), "data")
x = jax.make_array_from_callback((4,), NamedSharding(mesh, P("data")), lambda index: np.ones(4, np.float32)[index])
total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))
for i in range(3):
    if i == 1 and jax.process_index() == 1:
        print("at", time.monotonic(), flush=True)
        raise KeyError("the cause")
    float(total(x))
"""


@pytest.mark.rest
def test_who_raised_is_named_and_not_who_waits(together):
    """Also where the user's own hook is set before jdp's, which then calls it."""
    first, call, joining = JOIN.partition("joining.initialize")
    code, out, err = together(first + HOOK + call + joining + WAIT_FOR_EACH_OTHER)
    end = time.monotonic()
    assert code == 70 and err.startswith("jdp launch: process 1 of 2 ended with exit code 70. Its last output:")
    assert ", in <module>" in err and err.endswith("    KeyError: 'the cause'\n")
    assert "[1] my own hook saw KeyError\n" in out
    assert "[1] process 1 of 2 ends with an error:\n" in out
    (raised,) = re.findall(r"^\[1\] at (.*)$", out, re.MULTILINE)
    assert end - float(raised) < 15, "a minute is what JAX waits; 0.9 s on an idle machine"


@pytest.mark.rest
def test_who_ends_early_says_so(together):
    """A loop that is shorter on one process, or `sys.exit` there: the others wait for it in a collective."""
    early = JOIN + "joining.SHUTDOWN_SECONDS = 2" + WAIT_FOR_EACH_OTHER.replace('raise KeyError("the cause")', "break")
    code, _, err = together(early)
    assert code == 70 and "process 1 of 2 ended with exit code 70. Its last output:" in err
    assert "process 1 of 2 came to its end, and 2 seconds later others had not" in err


@pytest.mark.rest
def test_exit_codes_are_the_programs_own(together):
    code, _, err = together(JOIN + "print('done', flush=True); time.sleep(jax.process_index()); sys.exit(75)")
    assert code == 75 and "ended with exit code 75" in err and "came to its end" not in err
