"""`experiments/cluster/slurm.sbatch` on a real Slurm of two nodes: how its tasks end decides if it starts again."""

import json
import sys

import pytest
import slurm_cluster
from own_process import ROOT
from paths import EXPERIMENTS
from tiny_experiment import tables, write_tiny
from tiny_runs import rows

# A real Slurm; `test_schedulers.py` reads its environment.
pytestmark = pytest.mark.rest


TRAIN = {"steps": 80, "batch_size": 8, "log_every": 1, "checkpoint_every": 10, "eval_batches": 1}
DONE = ("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED", "TIMEOUT")
SECONDS = 300  # the machine may be busy


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if why := slurm_cluster.missing():
        pytest.skip(why)
    with slurm_cluster.slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        write_tiny(cluster.folder, tables(train=TRAIN), top="devices = 1\n")
        yield cluster


def submit(cluster, name, *options):
    """Submit the batch script for a cluster without GPUs; return the job's number."""
    text = (EXPERIMENTS / "cluster" / "slurm.sbatch").read_text()
    text = text.replace("#SBATCH --gpus-per-node=8\n", "").replace(" jdp train ", f" {sys.executable} -m jdp train ")
    (cluster.folder / "job.sh").write_text(text)
    words = ["env", f"PYTHONPATH={ROOT}", "sbatch", "--parsable", f"--job-name={name}", "job.sh", "tiny.toml"]
    return cluster.run(*words, f"--name={name}", *options, folder=cluster.folder).strip()


def losses(cluster, name):
    return rows(cluster.folder / "runs" / name, "loss", "grad_norm")


def reach(cluster, name, step):
    file = cluster.folder / "runs" / name / "metrics.jsonl"
    cluster.wait_for(lambda: file.exists() and max(losses(cluster, name), default=0) >= step, SECONDS, f"step {step}")


def finish(cluster, job):
    """Wait for the job's end; return its record and what it printed."""
    cluster.wait_for(lambda: cluster.job(job)["JobState"] in DONE, SECONDS, f"the end of job {job}")
    record = cluster.job(job)
    return record, (cluster.folder / f"{record['JobName']}-{job}.log").read_text()


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """The losses of the job that nothing happens to."""
    record, printed = finish(cluster, submit(cluster, "whole"))
    assert (record["JobState"], record["Restarts"], record["ExitCode"]) == ("COMPLETED", "0", "0:0"), printed
    return losses(cluster, "whole")


def test_the_doctor_examines_both_nodes(cluster):
    command = ["srun", "-N2", "-n2", sys.executable, "-m", "jdp", "doctor", "--json"]
    printed = cluster.run("env", f"PYTHONPATH={ROOT}", *command, seconds=120, check=False, folder=cluster.folder)
    report = json.loads(printed[printed.index("{") :])
    reduced = [finding["found"] for finding in report["findings"] if finding["check"] == "all-reduce"]
    assert report["processes"] == 2 and all(found.startswith("2 devices, right") for found in reduced), printed


def test_two_nodes_train_as_one(cluster, undisturbed):
    assert list(undisturbed) == list(range(1, 81))
    log = next(cluster.folder.glob("whole-*.log")).read_text()
    assert "0: whole: 7,984 parameters, ddp on data=2 cpu devices" in log


def test_preempted_and_broken_jobs_resume_exactly(cluster, undisturbed):
    """SIGTERM as `--signal=TERM@300` sends it, then a node without power, which is noticed after SlurmdTimeout."""
    job = submit(cluster, "cut")
    reach(cluster, "cut", 15)
    cluster.run("scancel", "--signal=TERM", job)  # to the tasks, not to the shell of the batch script
    cluster.wait_for(lambda: cluster.job(job)["Restarts"] == "1", SECONDS, "the first restart")
    reach(cluster, "cut", 45)
    cluster.kill_node("n2")
    cluster.wait_for(lambda: cluster.job(job)["JobState"] == "PENDING", SECONDS, "the job's place in the queue")
    cluster.start_node("n2")
    record, printed = finish(cluster, job)
    assert (record["JobState"], record["Restarts"], record["ExitCode"]) == ("COMPLETED", "2", "0:0"), printed
    assert "exit code 75: job" in printed and "is queued again" in printed
    assert printed.count("resumed after step") == 2 and "resumed after step 0" not in printed
    assert losses(cluster, "cut") == undisturbed


def test_a_mistake_is_not_tried_again(cluster):
    record, printed = finish(cluster, submit(cluster, "mistake", "--data.source", "nothing.txt"))
    assert (record["JobState"], record["Restarts"], record["ExitCode"]) == ("FAILED", "0", "2:0"), printed
    assert "nothing.txt" in printed and "is queued again" not in printed


def test_a_cancelled_job_saves_and_stays_cancelled(cluster):
    """scancel sends SIGTERM too, and the tasks leave with 75: to queue that again would bring the job back."""
    job = submit(cluster, "cancelled")
    reach(cluster, "cancelled", 15)
    cluster.run("scancel", job)
    record, _ = finish(cluster, job)
    assert record["JobState"] == "CANCELLED"
    cluster.wait_for(lambda: cluster.run("sinfo", "-h", "-o", "%T %D").strip() == "idle 2", 60, "two idle nodes")
    printed = (cluster.folder / f"cancelled-{job}.log").read_text()
    assert "stopped by SIGTERM after step" in printed and "is queued again" not in printed, printed
    assert (cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) == ("CANCELLED", "0")
