"""`jdp manifest`: jobs that the schedulers' own checkers take; mistakes are reported before anything is submitted."""

import os
import re
import shlex
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
from tiny_experiment import write_tiny

from jdp.checkpoint.memory.host import VARIABLE
from jdp.cli import main as cli
from jdp.cli import manifest

ROOT = Path(__file__).parents[2]
LLAMA = str(ROOT / "experiments" / "llama_8b_zero3.toml")
SIZE = ["--nodes", "4", "--per-node", "8"]
IMAGE = ["--image", "registry.local/team/jdp:1.0"]


def written(capfd, *words):
    assert cli.main(["manifest", *words]) == 0
    return capfd.readouterr().out


def kubernetes(capfd, *words):
    """The ConfigMap and the JobSet."""
    config, _, job_set = all_of(capfd, *words)
    return config, job_set


def all_of(capfd, *words):
    """The ConfigMap, the Secret and the JobSet."""
    return list(yaml.safe_load_all(written(capfd, "kubernetes", LLAMA, *SIZE, *IMAGE, *words)))


def job_of(job_set):
    (replicated,) = job_set["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_schemas_know_every_field(version, capfd):
    """All but the JobSet, and the job inside it as the API server sees it. `strict`: no unknown field."""
    config, secret, job_set = all_of(capfd, "--claim", "runs", "--queue", "team-a", "--namespace", "ml")
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job_of(job_set)}
    for resource in (config, secret, job):
        kubernetes_validate.validate(resource, version, strict=True)


def test_jobsets_own_types_know_every_field(capfd):
    """Made from its schema; what they do not know they drop. They fill in the protocol of a port."""
    _, job_set = kubernetes(capfd, "--claim", "runs", "--queue", "team-a", "--namespace", "ml")
    read = JobsetV1alpha2JobSet.from_dict(job_set).to_dict()
    for port in job_of(read)["template"]["spec"]["containers"][0]["ports"]:
        assert port.pop("protocol") == "TCP"
    assert read == job_set


def test_a_job_set_restarts_as_one_and_fails_for_mistakes(capfd):
    config, job_set = kubernetes(capfd, "--claim", "runs", "--queue", "team-a", "--train.steps", "777")
    spec, job = job_set["spec"], job_of(job_set)
    assert job_set["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team-a"} and spec["suspend"] is True
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 4, 4)
    assert job["backoffLimit"] == 0, "the first pod that fails ends its job, and the JobSet starts all of them again"
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [1, 2, 78, 130]
    assert spec["failurePolicy"]["maxRestarts"] == 10
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert tomllib.loads(config["data"]["experiment.toml"])["train"]["steps"] == 777


def test_pods_find_pod_0_by_the_name_that_the_job_set_gives_it(capfd):
    _, job_set = kubernetes(capfd)
    pod = job_of(job_set)["template"]["spec"]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    assert environment["JDP_NUM_PROCESSES"] == "4"
    assert any(entry["name"] == "JDP_NODE_NAME" for entry in container["env"]), "kubectl cordon takes it"
    assert environment["JDP_COORDINATOR"] == "llama-8b-zero3-workers-0-0.llama-8b-zero3:8476"
    assert job_set["spec"]["network"]["subdomain"] == "llama-8b-zero3"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert "labels" not in job_set["metadata"] and "suspend" not in job_set["spec"], "without Kueue it would wait"


def test_copies_in_memory_outlive_the_pods(capfd):
    pods = [job_of(kubernetes(capfd, *words)[1])["template"]["spec"] for words in ([], ["--guard.keep_in_memory=10"])]
    without, own = ([each for each in pod["volumes"] if each["name"] == "memory"] for pod in pods)
    assert (without, own) == ([], [{"name": "memory", "hostPath": {"path": "/dev/shm", "type": "Directory"}}])
    (container,) = pods[1]["containers"]
    assert {"name": VARIABLE, "value": "/jdp/memory"} in container["env"]
    assert {"name": "memory", "mountPath": "/jdp/memory"} in container["volumeMounts"]


def test_the_experiment_in_the_config_map_is_the_experiment(capfd, tmp_path):
    """What `jdp train` reads in the pod is what was checked here."""
    config, _ = kubernetes(capfd, "--strategy", "zero3", "--data.source", "/data/text.txt")
    (tmp_path / "experiment.toml").write_text(config["data"]["experiment.toml"])
    from jdp.experiment.file import load

    assert load(tmp_path / "experiment.toml") == load(LLAMA, {"strategy": "zero3", "data.source": "/data/text.txt"})


def test_the_pods_share_a_secret_that_is_new_in_each_manifest(tmp_path, capfd):
    made = [all_of(capfd, "--namespace", "ml") for _ in range(2)]
    (_, secret, job_set), (_, other, _) = made
    assert secret["metadata"] == {"name": "llama-8b-zero3-secret", "namespace": "ml"}
    assert len(secret["stringData"]["JDP_SECRET"]) == 64 and secret["stringData"] != other["stringData"]
    (container,) = job_of(job_set)["template"]["spec"]["containers"]
    (entry,) = [entry for entry in container["env"] if entry["name"] == "JDP_SECRET"]
    assert entry["valueFrom"] == {"secretKeyRef": {"name": "llama-8b-zero3-secret", "key": "JDP_SECRET"}}
    path = tmp_path / "job.yaml"
    path.write_text("an older one")
    written(capfd, "kubernetes", LLAMA, *SIZE, *IMAGE, "-o", str(path))
    assert stat.filemode(path.stat().st_mode) == "-rw-------", "the secret is in it"


def test_the_tasks_of_a_batch_script_share_a_secret_that_is_new_at_each_start(tmp_path, capfd):
    script = written(capfd, "slurm", LLAMA, *SIZE).replace(f"cd {shlex.quote(str(Path.cwd()))} ", f"cd {tmp_path} ")
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$JDP_SECRET,$JDP_SECRET_FILE"\n')
    (tmp_path / "srun").chmod(0o755)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("JDP_SECRET")}
    plain |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}

    def told(**given):
        ended = subprocess.run(["bash", "-c", script], env=plain | given, timeout=20, capture_output=True, text=True)
        return ended.stdout.strip()

    first, second = told(), told()
    assert re.fullmatch("[0-9a-f]{64},", first) and re.fullmatch("[0-9a-f]{64},", second) and first != second
    assert told(JDP_SECRET="mine") == "mine," and told(JDP_SECRET_FILE="/mine") == ",/mine"


def test_runs_that_nothing_keeps_are_reported(capfd):
    cli.main(["manifest", "kubernetes", LLAMA, *SIZE, *IMAGE])
    assert "without --claim the runs end with their pods" in capfd.readouterr().err


def test_a_batch_script_is_what_sbatch_takes(tmp_path, capfd):
    """Its text, and bash's opinion of it; `tests/launch/test_slurm.py` runs one."""
    path = tmp_path / "job.sh"
    more = [
        "--time",
        "2-00:00:00",
        "--sbatch",
        "partition=gpu",
        "--sbatch",
        "account=physics",
        "--run-dir",
        "/big runs",
    ]
    assert written(capfd, "slurm", LLAMA, *SIZE, *more, "--name", "a", "-o", str(path)) == ""
    text = path.read_text()
    options = {line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")}
    expected = {"nodes=4", "ntasks-per-node=1", "gpus-per-node=8", "requeue", "signal=TERM@300", "time=2-00:00:00"}
    assert expected | {"partition=gpu", "account=physics", "job-name=a"} <= options
    assert f"-m jdp train {LLAMA} '--run-dir=/big runs' --name=a\n" in text
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=20)


def test_a_job_that_comes_no_further_is_queued_again_so_often(tmp_path, capfd):
    """The script's own decision, between Slurm's commands; `tests/launch/test_slurm.py` has the real ones."""
    script, calls = tmp_path / "job.sh", tmp_path / "calls"
    written(capfd, "slurm", LLAMA, *SIZE, "--run-dir", str(tmp_path), "--max-restarts", "2", "-o", str(script))
    text = script.read_text().replace(f"cd {shlex.quote(str(Path.cwd()))} ", f"cd {tmp_path} ")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    save = 'date +%s%N > "$JDP_PROGRESS_FILE"; '
    cases = [(75, save, 4), (75, "", 2), (70, save, 2), (137, "", 2), (1, save, 0), (78, "", 0), (0, save, 0)]
    for code, saves, expected in cases:
        calls.write_text("")
        does = {"srun": f"{saves}exit {code}", "squeue": "echo RUNNING", "scontrol": f"echo $2 >> {calls}"}
        for name, line in does.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
            (tmp_path / name).chmod(0o755)
        queued = 0
        while queued < 4:
            ended = subprocess.run(["bash", "-c", text], env=environment, timeout=20, capture_output=True)
            assert ended.returncode == code
            if calls.read_text() == "7\n" * queued:
                break
            queued += 1
        assert queued == expected, f"exit code {code}"
        left = list(tmp_path.glob(".jdp-7.*"))
        assert bool(left) == (queued == 4), "what was counted is forgotten when the job has ended"
        for file in left:
            file.unlink()
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 70\n")
    (tmp_path / "squeue").write_text("#!/bin/sh\necho COMPLETING\n")
    subprocess.run(["bash", "-c", text], env=environment, timeout=20)
    assert not list(tmp_path.glob(".jdp-7.*")), "a node that Slurm lost takes no restart"


def test_virtual_devices_ask_for_no_gpus(tmp_path, capfd):
    file = str(write_tiny(tmp_path, "[train]\nsteps = 1\nbatch_size = 8\n", top="devices = 2\n"))
    text = written(capfd, "slurm", file, "--nodes", "2", "--per-node", "2")
    assert "gpu" not in text and "2 nodes, a task on each with its CPUs" in text


MISTAKES = {
    "nodes that do not multiply": (["slurm", LLAMA, "--nodes", "3", "--per-node", "8"], "3 nodes × 8 devices = 24: "),
    "a mesh that does not": (["slurm", LLAMA, *SIZE, "--mesh.data", "8"], "4 nodes × 8 devices = 32: [mesh]: "),
    "no nodes": (["slurm", LLAMA, "--nodes", "0", "--per-node", "8"], "--nodes must be from 1 to 100,000; given 0"),
    "other virtual devices": (
        ["slurm", LLAMA, *SIZE, "--devices", "4"],
        "--per-node must be the experiment's devices, its virtual CPU devices in each process; given 8 and devices = 4",
    ),
    "no image": (["kubernetes", LLAMA, *SIZE], "needs an image with jdp in it; given none: --image"),
    "an image with spaces": (
        ["kubernetes", LLAMA, *SIZE, "--image", "a b"],
        '--image is REGISTRY/NAME:TAG; given "a b"',
    ),
    "an image for Slurm": (["slurm", LLAMA, *SIZE, *IMAGE], "--image is for jdp manifest kubernetes; given slurm"),
    "a partition for Kubernetes": (
        ["kubernetes", LLAMA, *SIZE, *IMAGE, "--sbatch", "partition=gpu"],
        "--sbatch is for jdp manifest slurm; given kubernetes",
    ),
    "a name that is none": (
        ["kubernetes", LLAMA, *SIZE, *IMAGE, "--name", "2024"],
        "a JobSet's name begins with a letter",
    ),
    "a queue that is none": (["kubernetes", LLAMA, *SIZE, *IMAGE, "--queue", "A b"], "--queue is a name of Kubernetes"),
    "a script in an option": (
        ["slurm", LLAMA, *SIZE, "--sbatch", "x=1\nrm -rf /"],
        "--sbatch takes one option of sbatch",
    ),
    "nodes that are not checked": (["slurm", LLAMA, *SIZE, "--sbatch", "nodes=3"], "is checked for --nodes; given"),
    "a time that ends at once": (["slurm", LLAMA, *SIZE, "--time", "5"], "longer than the 300 seconds before its end"),
    "as many seconds": (["slurm", LLAMA, *SIZE, "--time", "0:05:00"], "longer than the 300 seconds before its end"),
    "a time that is none": (["slurm", LLAMA, *SIZE, "--time", "soon"], "--time is minutes, HOURS:MINUTES:SECONDS or"),
    "no such file": (["slurm", "nothing.toml", *SIZE], "there is no such file"),
    "no such folder": (["slurm", LLAMA, *SIZE, "-o", "/no/such/job.sh"], "there is no folder /no/such"),
    "restarts below none": (["slurm", LLAMA, *SIZE, "--max-restarts", "-1"], "--max-restarts must be from 0 to"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_exit_2(case, capfd):
    words, message = MISTAKES[case]
    assert cli.main(["manifest", *words]) == 2
    shown = capfd.readouterr()
    assert shown.err.startswith("error: ") and message in shown.err and shown.err.count("\n") == 1
    assert shown.out == ""


def test_data_beside_the_experiment_is_not_in_the_pods(tmp_path, capfd):
    file = str(write_tiny(tmp_path, "[train]\nsteps = 1\nbatch_size = 8\n"))
    words = ["manifest", "kubernetes", file, "--nodes", "2", "--per-node", "4", *IMAGE]
    assert cli.main(words) == 2
    assert "error: data.source must be a path in the pods; given " in capfd.readouterr().err
    assert cli.main([*words, "--data.source", "/data/text.txt"]) == 0


def test_no_scheduler_and_unknown_ones_are_refused(capfd):
    for words in (["lsf", LLAMA, *SIZE], [LLAMA, *SIZE], ["slurm", LLAMA]):
        with pytest.raises(SystemExit) as exiting:
            manifest.run(words)
        assert exiting.value.code == 2
        capfd.readouterr()


def test_the_script_names_the_python_that_wrote_it(capfd):
    assert f"\n  {sys.executable} -m jdp train " in written(capfd, "slurm", LLAMA, *SIZE)


def test_time_limits_are_read_as_slurm_reads_them():
    seconds = {"6": 360, "6:30": 390, "1:00:01": 3601, "2-1": 49 * 3600, "1-0:05": 86700, "1-0:00:05": 86405, "0": 0}
    assert {text: manifest._limit_seconds(text) for text in seconds} == seconds
