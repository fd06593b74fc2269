"""Joining a cluster: detected if there is one, never by mistake, and never failing in silence."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from jdp.core import distributed
from jdp.core.distributed import Cluster, find_cluster, first_host, initialize
from jdp.launch import launch

ROOT = Path(__file__).parents[2]

SLURM_STEP = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
SLURM_BATCH_SHELL = {
    "SLURM_JOB_ID": "4097",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "gpu[007-008]",
}
LAUNCHED = {"JDP_COORDINATOR": "127.0.0.1:1234", "JDP_NUM_PROCESSES": "2", "JDP_PROCESS_ID": "1"}

FOUND: dict[str, tuple[dict[str, str], Cluster | None]] = {
    "nothing": ({}, None),
    "jdp launch": (LAUNCHED, Cluster("jdp launch", "127.0.0.1:1234", 2, 1)),
    "jdp launch inside Slurm": (SLURM_STEP | LAUNCHED, Cluster("jdp launch", "127.0.0.1:1234", 2, 1)),
    "Slurm step": (SLURM_STEP, Cluster("Slurm", "gpu007:61441", 4, 3)),
    "Slurm step with its port": (SLURM_STEP | {"JAX_COORDINATOR_PORT": "9"}, Cluster("Slurm", "gpu007:9", 4, 3)),
    "Slurm batch shell": (SLURM_BATCH_SHELL, None),
    "Slurm interactive shell": (SLURM_BATCH_SHELL | {"SLURM_STEP_NUM_TASKS": "1"}, None),
    "Open MPI": ({"OMPI_COMM_WORLD_SIZE": "2"}, Cluster("Open MPI")),
    "Open MPI, one process": ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
    "JAX's variable": ({"JAX_COORDINATOR_ADDRESS": "h:1"}, Cluster("JAX_COORDINATOR_ADDRESS")),
    "Kubernetes": ({"JOB_COMPLETION_INDEX": "0"}, Cluster("Kubernetes, an indexed job")),
    "TPU pod": ({"TPU_WORKER_HOSTNAMES": "a,b"}, Cluster("TPU, several hosts")),
    "TPU host": ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
    "a single process on request": (SLURM_STEP | {"JDP_NUM_PROCESSES": "1"}, None),
}


@pytest.mark.parametrize(("environment", "expected"), FOUND.values(), ids=FOUND)
def test_a_cluster_is_found_in_the_environment(environment: dict[str, str], expected: Cluster | None):
    assert find_cluster(environment) == expected


def test_arguments_come_before_the_environment():
    assert find_cluster(LAUNCHED, "h:1", 3, 2) == Cluster("arguments", "h:1", 3, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("h:1", None, None), "takes all of coordinator, num_processes and process_id"),
        ((None, 2, 0), r"coordinator=None, num_processes=2, process_id=0"),
        (("h:1", 2, 2), "0 <= process_id < num_processes"),
        (("h", 2, 0), "HOST:PORT"),
    ],
)
def test_arguments_that_do_not_make_a_cluster_are_refused(arguments: tuple[Any, ...], message: str):
    with pytest.raises(ValueError, match=message):
        find_cluster({}, *arguments)


@pytest.mark.parametrize("missing", LAUNCHED)
def test_half_a_cluster_in_the_environment_is_an_error_and_not_a_run_alone(missing: str):
    with pytest.raises(ValueError, match="takes all of coordinator, num_processes and process_id"):
        find_cluster({name: value for name, value in LAUNCHED.items() if name != missing})
    with pytest.raises(ValueError, match=r"must be whole numbers; given 'x'"):
        find_cluster(LAUNCHED | {"JDP_PROCESS_ID": "x"})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[007-012,020],login", "gpu007"),
        ("gpu[3,5]", "gpu3"),
        ("rack[1-2]-gpu,x", "rack1-gpu"),
    ],
)
def test_the_first_host_of_a_slurm_node_list(nodes: str, host: str):
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("extra", "devices"),
    [
        ({}, None),
        ({"SLURM_GPUS_ON_NODE": "8"}, (4, 5, 6, 7)),
        ({"SLURM_GPUS_ON_NODE": "2"}, (1,)),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_GPUS_PER_TASK": "4"}, None),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=4"}, None),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_STEP_TASKS_PER_NODE": "3,1"}, None),
    ],
)
def test_a_slurm_task_takes_its_part_of_the_nodes_gpus(extra: dict[str, str], devices: tuple[int, ...] | None):
    cluster = find_cluster(SLURM_STEP | extra)
    assert cluster is not None and cluster.local_device_ids == devices


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `jax.distributed.initialize` was called with."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: seen.update(given))
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    for name in (*LAUNCHED, *SLURM_STEP, "OMPI_COMM_WORLD_SIZE", "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return seen


def test_alone_nothing_happens(joining: dict[str, Any]):
    initialize()
    initialize("h:1", 1, 0)
    assert joining == {}


def test_a_local_coordinator_listens_on_loopback_only_and_goes_round_proxies(joining: dict[str, Any]):
    initialize("127.0.0.1:5", 2, 1, timeout_seconds=7)
    assert joining["coordinator_bind_address"] == "127.0.0.1:5" and joining["initialization_timeout"] == 7
    assert (joining["coordinator_address"], joining["num_processes"], joining["process_id"]) == ("127.0.0.1:5", 2, 1)
    assert joining["cluster_detection_method"] == "deactivate"
    assert os.environ["no_grpc_proxy"] == "127.0.0.1"  # noqa: SIM112


def test_another_hosts_coordinator_listens_where_jax_says(joining: dict[str, Any]):
    initialize("gpu007:5", 2, 1)
    assert joining["coordinator_bind_address"] is None


def test_jax_works_out_the_clusters_that_only_it_can(joining: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "gpu007:5")
    initialize()
    assert joining and "coordinator_address" not in joining and "cluster_detection_method" not in joining


def test_failing_to_join_is_never_swallowed(joining: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    def fail(**_: Any) -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    with pytest.raises(
        RuntimeError, match=r"part of a cluster \(arguments\) and could not join it: coordinator_address"
    ):
        initialize("h:1", 2, 0)


def test_joining_twice_does_nothing_and_joining_another_is_refused(
    joining: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(distributed, "joined_as", lambda: (1, 2))
    initialize("h:1", 2, 1)
    assert joining == {}
    with pytest.raises(ValueError, match="already joined a cluster as number 1 of 2"):
        initialize("h:1", 3, 1)


@pytest.fixture
def together(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[[str], tuple[int, str, str]]:
    """Runs a program as two processes with two devices each; returns the exit code, stdout and stderr."""

    def run(text: str) -> tuple[int, str, str]:
        path = tmp_path / "program.py"
        path.write_text(text)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "http_proxy": "http://127.0.0.1:9"}
        code = launch([sys.executable, str(path)], 2, devices_per_process=2, environment=environment)
        return code, *capfd.readouterr()

    return run


JOIN = """
import jax, jax.numpy as jnp, numpy as np, sys, time
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jdp.core import distributed
distributed.initialize(timeout_seconds=60)
distributed.initialize()
"""


def test_two_processes_sum_over_four_devices(together: Callable[[str], tuple[int, str, str]]):
    code, out, err = together(
        JOIN
        + """
mesh = Mesh(jax.devices(), "data")
whole = np.arange(1, 5, dtype=np.float32)
x = jax.make_array_from_callback((4,), NamedSharding(mesh, P("data")), lambda index: whole[index])
total = jax.jit(jax.shard_map(lambda part: jax.lax.psum(part, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()))(x)
print("joined", distributed.joined_as(), jax.process_index(), jax.local_device_count(), float(total[0]), flush=True)
"""
    )
    assert code == 0, err
    assert "[0] joined (0, 2) 0 2 10.0\n" in out and "[1] joined (1, 2) 1 2 10.0\n" in out


def test_a_failure_does_not_wait_in_the_exit_barrier(together: Callable[[str], tuple[int, str, str]]):
    code, out, err = together(
        JOIN
        + """
jax.devices()
if jax.process_index() == 1:
    print("rank 1 gives up", flush=True)
    distributed.leave_after_failure(3)
time.sleep(100)
print("waited", flush=True)
"""
    )
    assert code == 3 and "process 1 of 2 ended with exit code 3" in err and "rank 1 gives up" in err
    assert "waited" not in out


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
        raise KeyError("the cause")
    float(total(x))
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_who_raised_is_named_and_not_who_waits(together: Callable[[str], tuple[int, str, str]], when: str):
    """Whether the user's own hook is set before jdp's, which then calls it, or in place of it."""
    start = time.monotonic()
    setting = HOOK.replace("before(kind", "sys.__excepthook__(kind") if when == "after" else HOOK
    first, _, joining = JOIN.partition("distributed.initialize")
    text = first + HOOK + _ + joining if when == "before" else JOIN + setting
    code, out, err = together(text + WAIT_FOR_EACH_OTHER)
    assert code == 70 and "process 1 of 2 ended with exit code 70. Its last output:" in err
    assert "    KeyError: 'the cause'\n" in err
    assert "[1] my own hook saw KeyError\n" in out
    assert ("[1] process 1 of 2 ends with an error:\n" in out) == (when == "before")
    assert time.monotonic() - start < 40, "a minute is what JAX waits"


def test_who_ends_early_says_so(together: Callable[[str], tuple[int, str, str]]):
    """A loop that is shorter on one process, or `sys.exit` there: the others wait for it in a collective."""
    early = (
        JOIN + "distributed.SHUTDOWN_SECONDS = 2" + WAIT_FOR_EACH_OTHER.replace('raise KeyError("the cause")', "break")
    )
    code, _, err = together(early)
    assert code == 70 and "process 1 of 2 ended with exit code 70. Its last output:" in err
    assert "process 1 of 2 came to its end, and 2 seconds later others had not" in err


def test_exit_codes_are_the_programs_own(together: Callable[[str], tuple[int, str, str]]):
    code, _, err = together(JOIN + "print('done', flush=True); time.sleep(jax.process_index()); sys.exit(75)")
    assert code == 75 and "ended with exit code 75" in err and "came to its end" not in err


def test_the_hook_is_put_in_once_and_only_in_a_cluster(joining: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    shown: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *given: shown.append(given))
    monkeypatch.setattr(distributed.atexit, "register", lambda function: None)
    own = sys.excepthook
    initialize()
    assert sys.excepthook is own, "a process on its own is left as it is"
    initialize("h:1", 2, 1)
    hook = sys.excepthook
    monkeypatch.setattr(distributed, "joined_as", lambda: (1, 2))
    initialize("h:1", 2, 1)
    assert sys.excepthook is hook is not own
    left: list[Any] = []
    monkeypatch.setattr(distributed.os, "_exit", left.append)
    slept: list[float] = []
    monkeypatch.setattr(distributed.time, "sleep", slept.append)
    lost = jax.errors.JaxRuntimeError("Connection closed by peer")
    for error, expected in ((KeyError("x"), []), (lost, [distributed.LAST_WORDS_SECONDS])):
        hook(type(error), error, None)
        assert slept == expected, "who lost a peer lets the cause end first"
        assert shown[-1] == (type(error), error, None)
    hook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert left == [70, 70, 130]


def test_alone_a_failure_leaves_by_the_ordinary_way():
    assert distributed.leave_after_failure(3) is None  # it returned, and did not end this process
