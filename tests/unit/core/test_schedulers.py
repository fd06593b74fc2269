"""Which cluster an environment describes: none by mistake, and no half of one."""

import os
import socket

import pytest

from jdp.base import machine
from jdp.core.cluster.schedulers import Cluster, find_cluster

SLURM_STEP = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
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
OPEN_MPI = {  # both versions, on one host and on two
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
OPEN_MPI_4 = OPEN_MPI | {
    "PMIX_NAMESPACE": "2017198081",
    "OMPI_MCA_orte_hnp_uri": "2017198080.0;tcp://192.0.2.2,10.0.0.2:39659;tcp6://[fd00::2]:41659",
    "OMPI_MCA_orte_local_daemon_uri": "2017198080.1;tcp://192.0.2.3:39000",
}
OPEN_MPI_5 = OPEN_MPI | {"PMIX_NAMESPACE": "prterun-gpu-007-14470@1", "PMIX_HOSTNAME": "gpu-008"}
PORT_4, PORT_5 = 62846, 65508  # of these job names
POD = {"JOB_COMPLETION_INDEX": "1", "JDP_NUM_PROCESSES": "3"}

FOUND: dict[str, tuple[dict[str, str], Cluster | None]] = {
    "nothing": ({}, None),
    "jdp launch, ssh": (LAUNCHED, Cluster("JDP_COORDINATOR", "127.0.0.1:1234", 2, 1)),
    "jdp launch inside Slurm": (SLURM_STEP | LAUNCHED, Cluster("JDP_COORDINATOR", "127.0.0.1:1234", 2, 1)),
    "Slurm step": (SLURM_STEP, Cluster("Slurm", "gpu007:61441", 4, 3)),
    "Slurm step with its port": (SLURM_STEP | {"JAX_COORDINATOR_PORT": "9"}, Cluster("Slurm", "gpu007:9", 4, 3)),
    "Slurm step with its address": (SLURM_STEP | {"JDP_COORDINATOR": "ib7:9"}, Cluster("Slurm", "ib7:9", 4, 3)),
    "Slurm batch shell": (SLURM_BATCH_SHELL, None),
    "Open MPI, one host": (
        OPEN_MPI | {"PMIX_NAMESPACE": "2017198081", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
        Cluster("Open MPI", f"127.0.0.1:{PORT_4}", 4, 1),
    ),
    "Open MPI 4, two hosts": (OPEN_MPI_4, Cluster("Open MPI", f"192.0.2.2:{PORT_4}", 4, 1)),
    "Open MPI 5, two hosts": (OPEN_MPI_5, Cluster("Open MPI", f"gpu-007:{PORT_5}", 4, 1)),
    "Open MPI inside Slurm": (SLURM_STEP | OPEN_MPI_5, Cluster("Open MPI", f"gpu-007:{PORT_5}", 4, 1)),
    "Open MPI, one process": ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
    "JAX's variable": ({"JAX_COORDINATOR_ADDRESS": "h:1"}, Cluster("JAX_COORDINATOR_ADDRESS")),
    "Kubernetes": (POD | {"JDP_COORDINATOR": "p-0.s:8"}, Cluster("Kubernetes, an indexed job", "p-0.s:8", 3, 1)),
    "Kubernetes, a pod on its own": (POD | {"JDP_NUM_PROCESSES": "1"}, None),
    "TPU pod": ({"TPU_WORKER_HOSTNAMES": "a,b"}, Cluster("TPU, several hosts")),
    "TPU host": ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
    "a single process on request": (SLURM_STEP | {"JDP_NUM_PROCESSES": "1"}, None),
}


@pytest.fixture
def describe(monkeypatch):
    """Set these variables, and none other that describes a cluster."""
    for name in os.environ:
        if name.startswith(("JDP_", "JAX_COORDINATOR", "SLURM_", "OMPI_", "PMIX_")):
            monkeypatch.delenv(name)
    return lambda variables: [monkeypatch.setenv(*each) for each in variables.items()]


@pytest.mark.parametrize(("environment", "expected"), FOUND.values(), ids=FOUND)
def test_a_cluster_is_found_in_the_environment(environment, expected, describe):
    describe(environment)
    assert find_cluster() == expected


def test_arguments_come_before_the_environment(describe):
    describe(LAUNCHED)
    assert find_cluster("h:1", 3, 2) == Cluster("arguments", "h:1", 3, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, 2, 0), r"coordinator=None, num_processes=2, process_id=0"),
        (("h:1", 2, 2), "0 <= process_id < num_processes"),
        (("h:70000", 2, 0), "a port from 1 to 65535"),
        (("::1:29500", 2, 0), r"brackets before its port; given '::1:29500'. Write \[::1\]:29500"),
    ],
)
def test_arguments_without_a_cluster_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        find_cluster(*arguments)


@pytest.mark.parametrize(
    ("own", "coordinator"),
    [
        ("train-1.train.default.svc.cluster.local", "train-0.train.default.svc.cluster.local:8476"),
        ("set-workers-0-1.set", "set-workers-0-0.set:8476"),
    ],
)
def test_a_pod_finds_pod_0_by_name(own, coordinator, describe, monkeypatch):
    describe(POD)
    monkeypatch.setattr(socket, "getfqdn", lambda: own)
    assert find_cluster() == Cluster("Kubernetes, an indexed job", coordinator, 3, 1)


REFUSED = {
    **{
        f"without {name}": ({**LAUNCHED, name: None}, "takes all of coordinator, num_processes and process_id")
        for name in LAUNCHED
    },
    "no number": (LAUNCHED | {"JDP_PROCESS_ID": "x"}, "must be whole numbers; given 'x'"),
    "mpirun names no host": (OPEN_MPI, r"names no host\. Name rank 0's: mpirun -x JDP_COORDINATOR="),
    "another count": (SLURM_STEP | {"JDP_NUM_PROCESSES": "8"}, r"that Slurm started, 4; given 8\. Unset it"),
    "no count": (
        {"JOB_COMPLETION_INDEX": "0"},
        r"by JDP_NUM_PROCESSES; it is not set.*experiments/cluster/jobset.yaml",
    ),
    "no service": (POD, r"by a headless service.*given a pod named 'train-1'.*subdomain"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_half_a_cluster_is_an_error(case, describe, monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-1")
    environment, message = REFUSED[case]
    describe({name: value for name, value in environment.items() if value is not None})
    with pytest.raises(ValueError, match=message):
        find_cluster()


EIGHT = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
TWO, FOUR = {"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        (SLURM_STEP, None),
        (SLURM_STEP | EIGHT, (4, 5, 6, 7)),
        (SLURM_STEP | TWO, (1,)),
        (SLURM_STEP | FOUR | {"SLURM_GPUS_PER_TASK": "4"}, None),
        (SLURM_STEP | FOUR | {"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=4"}, None),
        (SLURM_STEP | FOUR | {"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, None),
        (OPEN_MPI_4 | EIGHT, (4, 5, 6, 7)),
        (OPEN_MPI_4 | TWO, (1,)),
        (OPEN_MPI_4 | {"CUDA_VISIBLE_DEVICES": "5"}, None),
    ],
)
def test_a_rank_takes_its_hosts_gpus(environment, devices, describe, monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda _: True)  # as if JAX had its CUDA plugin
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    describe(environment)
    cluster = find_cluster()
    assert cluster is not None and cluster.local_device_ids == devices
