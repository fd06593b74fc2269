"""Two hosts with addresses of their own: processes that ssh or mpirun starts join, and a link that is cut ends both.

The hosts are network namespaces on this machine that a virtual cable joins. Each has an interface `cable` with its
address of ADDRESSES, and a loopback of its own; nothing else is reachable from them. Each knows both names. The cable
is cut by taking one end down, which loses packets without a word to either side, as a pulled one does.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import yaml
from own_process import environment
from paths import EXPERIMENTS, SUPPORT
from tiny_experiment import points_text, tables, train_here, write_points
from tiny_runs import rows

# Two network namespaces; `test_nodes.py` has two nodes of one network.
pytestmark = pytest.mark.rest


TRAIN = {"steps": 24, "batch_size": 8, "log_every": 1, "checkpoint_every": 5, "eval_batches": 1}
SECONDS = 200  # the machine may be busy


NAMES = ("h0", "h1")
ADDRESSES = ("192.0.2.1", "192.0.2.2")  # TEST-NET-1: nobody's
NAMESPACES = tuple(f"jdp{os.getpid() % 100000}{name}" for name in NAMES)


def missing():
    """Why there can be no such hosts here; None if there can."""
    absent = [name for name in ("ip", "unshare", "hostname") if shutil.which(name) is None]
    if os.geteuid() != 0 or absent:
        return f"two hosts on one machine need root and iproute2 (no {absent[0] if absent else 'root'})"
    tried = subprocess.run(["ip", "netns", "add", NAMESPACES[0]], capture_output=True, text=True, timeout=20)
    if tried.returncode != 0:
        return f"this machine has no network namespaces: {tried.stderr.strip()}"
    ip("netns", "delete", NAMESPACES[0])
    return None


def ip(*words):
    subprocess.run(["ip", *words], check=True, timeout=20, capture_output=True)


def cut():
    ip("-n", NAMESPACES[1], "link", "set", "cable", "down")


def join():
    for namespace in NAMESPACES:
        ip("-n", namespace, "link", "set", "cable", "up")


@pytest.fixture
def on(tmp_path):
    """The command line that runs a command on host 0 or 1. The /etc/hosts of host N is `hostsN`."""
    if why := missing():
        pytest.skip(why)

    def on(number, command):
        script = f'hostname {NAMES[number]} && mount --bind {tmp_path}/hosts{number} /etc/hosts && exec "$@"'
        own_names = ["unshare", "--uts", "--mount", "sh", "-c", script, "sh"]
        return ["ip", "netns", "exec", NAMESPACES[number], *own_names, *command]

    lines = ["127.0.0.1 localhost", *map(" ".join, zip(ADDRESSES, NAMES, strict=True))]
    try:
        for number, namespace in enumerate(NAMESPACES):
            (tmp_path / f"hosts{number}").write_text("\n".join(lines) + "\n")
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        ends = [("cable", "netns", NAMESPACES[0]), ("peer", "name", "cable", "netns", NAMESPACES[1])]
        ip("link", "add", *ends[0], "type", "veth", *ends[1])
        for namespace, address in zip(NAMESPACES, ADDRESSES, strict=True):
            ip("-n", namespace, "address", "add", f"{address}/24", "dev", "cable")
        join()
        yield on
    finally:
        for namespace in NAMESPACES:  # the cable goes with them
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", namespace)


def write(folder, **train):
    optimizer = {"name": "sgd", "momentum": 0.9}
    write_points(folder, points_text(tables(optimizer=optimizer, train=TRAIN | train), top="devices = 1\n"))


@pytest.fixture
def start(on, tmp_path):
    """Start a command on host 0 or 1; its output goes to outN. Whatever still runs at the end of the test is killed."""
    started = []

    def start(number, *command, **variables):
        own = environment(JAX_PLATFORMS="cpu", **variables)
        with (tmp_path / f"out{number}").open("wb") as out:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            started.append(subprocess.Popen(on(number, command), env=own, **streams))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def end(folder, *processes):
    """Wait for the processes of hosts 0 and 1; return their exit codes, and what they printed."""
    codes = [process.wait(SECONDS) for process in processes]
    return codes, [(folder / f"out{number}").read_text(errors="replace") for number in range(2)]


def wait_for(condition, processes):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert [process.poll() for process in processes] == [None] * len(processes), "a process has ended"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_cut_link_ends_both_with_reasons(start, tmp_path):
    """The deadline's thread ends both, because the other one is silent; JAX' heartbeats name nobody and take longer."""
    write(tmp_path)
    runs, go = tmp_path / "runs", tmp_path / "go"
    held = {"0:0:17": f"wait for {go}", "folder": str(tmp_path)}  # the cut comes in the middle, however fast steps are
    program = [str(SUPPORT / "faulty.py"), json.dumps(held)]

    def both(*program):
        place = {"JDP_COORDINATOR": f"{ADDRESSES[0]}:8476", "JDP_NUM_PROCESSES": "2", "JDP_RESTARTS": "0"}
        train = [sys.executable, *program, "train", f"{tmp_path}/points.toml", f"--run-dir={runs}"]
        return [start(number, *train, JDP_PROCESS_ID=str(number), **place) for number in range(2)]

    hosts = both(*program)
    wait_for((tmp_path / "0:0").exists, hosts)
    cut()
    since = time.monotonic()
    go.touch()
    codes, printed = end(tmp_path, *hosts)
    assert codes == [75, 75], printed
    assert time.monotonic() - since < 120
    assert "Process 1 does not answer: " in printed[0]
    assert "process 0 is stopped or gone, or the network to it" in printed[1]
    join()
    codes, printed = end(tmp_path, *both("-m", "jdp"))
    assert codes == [0, 0], printed
    (step,) = re.findall(r"resumed after step (\d+)", printed[0])
    assert step in ("10", "15"), "each save waits for the one before"
    train_here(tmp_path / "points.toml", tmp_path / "whole", {}, devices=2)
    resumed, whole = (rows(folder / "points", "loss", "grad_norm") for folder in (runs, tmp_path / "whole"))
    assert resumed == whole


def test_a_killed_hosts_memory_comes_from_its_neighbour(start, tmp_path):
    """Nothing is in storage. Each host has a folder of its own for its memory; host 1 comes back with an empty one."""
    write(tmp_path, checkpoint_every=0)
    train = ["train", f"{tmp_path}/points.toml", f"--run-dir={tmp_path}/runs", "--guard.keep_in_memory=3"]

    def node(number, faults):
        memory = tmp_path / f"memory{number}"
        memory.mkdir()
        program = [str(SUPPORT / "faulty.py"), json.dumps({"folder": str(tmp_path)} | faults)]
        where = ["--nodes=2", f"--node-rank={number}", f"--coordinator={ADDRESSES[0]}:29500"]
        launch = [sys.executable, "-m", "jdp", "launch", "-n=1", *where, "--max-restarts=1", "--"]
        return start(number, *launch, sys.executable, *program, *train, JDP_MEMORY_DIR=str(memory))

    hosts = [node(number, {"0:1:17": "kill the node"}) for number in range(2)]
    hosts[1].wait(SECONDS)
    shutil.rmtree(tmp_path / "memory1")
    codes, printed = end(tmp_path, hosts[0], node(1, {}))
    assert codes == [0, 0], printed
    restored = r"step (\d+) is restored from the hosts' memory, .* from other hosts; storage has no"
    (step,) = re.findall(restored, printed[0])
    assert step in ("12", "15"), "two copies at most are lost"
    train_here(tmp_path / "points.toml", tmp_path / "whole", {}, devices=2)
    killed, whole = (rows(folder / "points", "loss", "grad_norm") for folder in (tmp_path / "runs", tmp_path / "whole"))
    assert killed == whole


def test_pods_join_once_pod_0_has_a_name(start, tmp_path):
    """Pod 1 is there first, and waits: Kubernetes gives pod 0's name an address once that pod is there."""
    write(tmp_path, steps=3)
    text = (EXPERIMENTS / "cluster" / "jobset.yaml").read_text().replace("/jdp/", f"{tmp_path}/")
    (tmp_path / "experiment").mkdir()
    for name in ("points.toml", "points.npz"):
        shutil.copy(tmp_path / name, tmp_path / "experiment" / name.replace("points.toml", "experiment.toml"))
    spec = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}

    def pod(index):
        return start(index, sys.executable, "-m", *container["command"], JOB_COMPLETION_INDEX=str(index), **given)

    pod_1 = pod(1)
    waits = "process 1 of 2 is here: waiting, as process 0 does not answer at train-workers-0-0.train:8476 ("
    wait_for(lambda: waits in (tmp_path / "out1").read_text(), [pod_1])
    for number in range(2):
        with (tmp_path / f"hosts{number}").open("a") as names:
            names.write(f"{ADDRESSES[0]} train-workers-0-0.train\n")
    codes, printed = end(tmp_path, pod(0), pod_1)
    assert codes == [0, 0] and "step 3/3  loss" in printed[0], printed
