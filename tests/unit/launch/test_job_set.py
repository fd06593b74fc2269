"""`experiments/cluster/jobset.yaml`: the schemas of Kubernetes and JobSet know every field, and its parts agree.

`test_two_hosts.py` starts its command with its variables.
"""

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
from paths import EXPERIMENTS

from jdp.checkpoint.memory.host import VARIABLE

FILE = EXPERIMENTS / "cluster" / "jobset.yaml"


@pytest.fixture
def job_set():
    return yaml.safe_load(FILE.read_text())


def job_of(job_set):
    (replicated,) = job_set["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_schema_knows_every_field_of_the_job(version, job_set):
    """The job as the API server sees it. `strict`: no unknown field."""
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job_of(job_set)}
    kubernetes_validate.validate(job, version, strict=True)


def test_jobsets_own_types_know_every_field(job_set):
    """Made from its schema; what they do not know they drop. They fill in the protocol of a port."""
    read = JobsetV1alpha2JobSet.from_dict(job_set).to_dict()
    for port in job_of(read)["template"]["spec"]["containers"][0]["ports"]:
        assert port.pop("protocol") == "TCP"
    assert read == job_set


def test_it_restarts_as_one_and_fails_for_mistakes(job_set):
    spec, job = job_set["spec"], job_of(job_set)
    assert job["backoffLimit"] == 0, "the first pod that fails ends its job, and the JobSet starts all of them again"
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [1, 2, 78, 130]
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_pods_find_pod_0_by_job_set_name(job_set):
    name, job = job_set["metadata"]["name"], job_of(job_set)
    (container,) = job["template"]["spec"]["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    (workers,) = job_set["spec"]["replicatedJobs"]
    pod_0 = f"{name}-{workers['name']}-0-0.{job_set['spec']['network']['subdomain']}"
    assert environment["JDP_COORDINATOR"] == f"{pod_0}:8476"
    assert int(environment["JDP_NUM_PROCESSES"]) == job["completions"] == job["parallelism"]
    assert environment[VARIABLE] in [mount["mountPath"] for mount in container["volumeMounts"]]
