"""A JobSet for Kubernetes, with Kueue's labels: a run that goes on after evictions and lost nodes.

One pod a node drives all of its GPUs. The pods are an indexed job, so each knows its number. The JobSet's headless
service gives them names, and `jdp.initialize` joins them by pod 0's, without any rights. The experiment is in a
ConfigMap. A Secret has the secret of the pods: only processes that know it are heard on jdp's own ports.
The cause of a pod's end decides how the others go on:

| cause                          | exit code          | then                                                          |
|--------------------------------|--------------------|---------------------------------------------------------------|
| a node, an evicted pod         | 75, or none        | all pods start again, and go on from the last checkpoint      |
| a process, or the program      | 70, 128 + signal   | likewise                                                      |
| a mistake, Ctrl-C              | 1, 2, 78, 130      | the JobSet has failed                                         |

The job fails with its first pod (`backoffLimit: 0`): pods of one run cannot be replaced one by one. A pod that failed
by a mistake gives the failure another reason (`podFailurePolicy`), which the JobSet's own policy tells apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from jdp.core.cluster.schedulers import KUBERNETES_PORT
from jdp.launch.secret import SECRET

MISTAKES = (1, 2, 78, 130)  # exit codes that another try would repeat
WORKERS = "workers"
EXPERIMENT_FOLDER, EXPERIMENT_FILE, RUNS_FOLDER = "/jdp/experiment", "experiment.toml", "/jdp/runs"
MEMORY, MEMORY_FOLDER = "JDP_MEMORY_DIR", "/jdp/memory"  # `checkpoint.memory.host` reads the variable
LONGEST_NAME = 40  # with "-workers-0-" and an index it is a pod's host name, of 63 characters at most


@dataclass(frozen=True)
class KubernetesJob:
    """The parameters of a JobSet.

    Attributes:
        secret: that of the pods; whoever reads the manifest has it.
        claim: a persistent volume claim that all pods may write, for the runs; None: they end with the pods.
        keeps_in_memory: the node's /dev/shm is mounted for copies of the state, as the pod's own ends with the pod.
    """

    name: str  # a DNS label of at most LONGEST_NAME characters, which begins with a letter
    image: str  # with jdp in it
    experiment: str  # the experiment file's text
    arguments: Sequence[str]  # of `jdp train`, after the file
    nodes: int  # number of pods
    gpus_per_node: int  # 0 for a run on CPUs
    secret: str
    claim: str | None = None
    keeps_in_memory: bool = False
    namespace: str | None = None  # None for kubectl's
    queue: str | None = None  # Kueue's local queue; None without Kueue
    max_restarts: int = 10  # how often all pods may start again
    grace_seconds: int = 300  # from SIGTERM to SIGKILL


def manifest(job: KubernetesJob) -> str:
    """Return the YAML that `kubectl apply` takes: a ConfigMap with the experiment, a Secret, and the JobSet."""
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, f"{job.name}-experiment"),
        "data": {EXPERIMENT_FILE: job.experiment},
    }
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(job, f"{job.name}-secret"),
        "stringData": {SECRET: job.secret},
    }
    head = f"# {job.name}: {job.nodes} pods, one a node. Written by `jdp manifest kubernetes`; kubectl apply -f FILE\n"
    return head + yaml.dump_all([config, secret, _job_set(job)], Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block."""


def _block_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block_text)


def _metadata(job: KubernetesJob, name: str) -> dict[str, Any]:
    return {"name": name} | ({} if job.namespace is None else {"namespace": job.namespace})


def _job_set(job: KubernetesJob) -> dict[str, Any]:
    """Return the JobSet. With a queue it begins suspended, and Kueue starts it when there is room for all pods."""
    queued = {} if job.queue is None else {"labels": {"kueue.x-k8s.io/queue-name": job.queue}}
    spec: dict[str, Any] = {} if job.queue is None else {"suspend": True}
    spec |= {
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": job.max_restarts,
            "rules": [{"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        "replicatedJobs": [{"name": WORKERS, "replicas": 1, "template": {"spec": _job(job)}}],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job, job.name) | queued,
        "spec": spec,
    }


def _job(job: KubernetesJob) -> dict[str, Any]:
    """Return the indexed job's spec."""
    on_mistake = {"containerName": "train", "operator": "In", "values": list(MISTAKES)}
    return {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": on_mistake}]},
        "template": {"spec": _pod(job)},
    }


def _pod(job: KubernetesJob) -> dict[str, Any]:
    """Return the pod's spec. /dev/shm, of which a container has 64 MiB by default, is as large as the memory allows."""
    runs = {"emptyDir": {}} if job.claim is None else {"persistentVolumeClaim": {"claimName": job.claim}}
    volumes: dict[str, tuple[str, dict[str, Any]]] = {
        "experiment": (EXPERIMENT_FOLDER, {"configMap": {"name": f"{job.name}-experiment"}}),
        "runs": (RUNS_FOLDER, runs),
        "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory"}}),
    }
    memory: list[dict[str, Any]] = []
    if job.keeps_in_memory:
        volumes["memory"] = (MEMORY_FOLDER, {"hostPath": {"path": "/dev/shm", "type": "Directory"}})
        memory.append({"name": MEMORY, "value": MEMORY_FOLDER})
    container: dict[str, Any] = {
        "name": "train",
        "image": job.image,
        "command": [
            *("jdp", "train", f"{EXPERIMENT_FOLDER}/{EXPERIMENT_FILE}", f"--run-dir={RUNS_FOLDER}"),
            *job.arguments,
        ],
        "env": [
            {"name": "JDP_NUM_PROCESSES", "value": str(job.nodes)},
            {"name": "JDP_COORDINATOR", "value": f"{job.name}-{WORKERS}-0-0.{job.name}:{KUBERNETES_PORT}"},
            {"name": "JDP_NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            *memory,
            {"name": SECRET, "valueFrom": {"secretKeyRef": {"name": f"{job.name}-secret", "key": SECRET}}},
        ],
        "ports": [{"name": "coordinator", "containerPort": KUBERNETES_PORT}],
        "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_seconds,
        "containers": [container],
        "volumes": [{"name": name, **kind} for name, (_, kind) in volumes.items()],
    }
    if job.gpus_per_node:
        container["resources"] = {"limits": {"nvidia.com/gpu": job.gpus_per_node}}
        pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return pod
