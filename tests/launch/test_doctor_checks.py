"""`jdp doctor` finds real faults: each is made here, as far as this machine allows, and found in words that mend it."""

import json
import resource
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest
from full_disk import small_disk
from own_process import environment

from jdp.core.cluster.schedulers import Cluster
from jdp.launch.doctor.disk import examine_disk, existing
from jdp.launch.doctor.findings import Examined, Finding
from jdp.launch.doctor.limits import examine_limits
from jdp.launch.doctor.nccl import cure
from jdp.launch.doctor.network import call_roll, examine_names, examine_port
from jdp.launch.doctor.versions import examine_versions

LIMITS = "import json; from jdp.launch.doctor.limits import examine_limits as e; print(json.dumps([*map(vars, e())]))"


def named(findings, check):
    (found,) = (finding for finding in findings if finding.check == check)
    return found


def shell(*words, timeout=60):
    return subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=timeout, check=False)


def limits_after(command):
    """What is found of the limits in a process that a shell starts after `command`."""
    done = shell("bash", "-c", f'{command}; exec "$0" -c "$1"', sys.executable, LIMITS)
    assert done.returncode == 0, done.stderr
    return [Finding(**each) for each in json.loads(done.stdout)]


# This machine.


def test_limits_of_the_shell():
    findings = limits_after("ulimit -n 64; ulimit -u 2000")
    files, threads = named(findings, "open files"), named(findings, "threads")
    assert (files.status, files.found) == ("wrong", "at most 64 (ulimit -n)")
    assert "nofile" in files.mend, "only root may raise it again"
    assert threads.status == "wrong" and threads.found.startswith("at most 2,000 (ulimit -u)")
    assert threads.mend.startswith("ulimit -u 65536")


@pytest.mark.parametrize(("files", "status"), [(64, "wrong"), (1023, "wrong"), (1024, "ok")])
def test_a_limit_that_this_user_may_raise(files, status):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    try:
        found = named(examine_limits(), "open files")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found.status == status
    assert found.mend.startswith("ulimit -n ") if status == "wrong" else not found.mend


@contextmanager
def control_group(controller, limits):
    """A control group two below the topmost, in whichever version this machine has; the limit is on the upper one."""
    old = Path(f"/sys/fs/cgroup/{controller}")
    top = old if old.is_dir() else Path("/sys/fs/cgroup")
    upper, lower = top / f"jdp-{uuid.uuid4().hex}", "job"
    try:
        upper.mkdir()
        for name, value in limits.items():
            if (upper / name).exists():
                (upper / name).write_text(value)
        (upper / lower).mkdir()
        if not any((upper / name).exists() for name in limits):
            pytest.skip("this process may not limit a control group")
    except OSError:
        pytest.skip("this process may not limit a control group")
    try:
        yield upper / lower
    finally:
        (upper / lower).rmdir()
        upper.rmdir()


def test_a_control_group_above_that_limits_threads():
    with control_group("pids", {"pids.max": "100"}) as group:
        found = named(limits_after(f"echo $$ > {group}/cgroup.procs"), "threads")
    assert found.status == "wrong" and "in the control group" in found.found
    assert found.mend.startswith("raise pids.max")


def test_a_control_group_above_that_limits_memory():
    """Slurm and systemd put a job several groups deep."""
    size = str(2**29)
    with control_group("memory", {"memory.max": size, "memory.limit_in_bytes": size}) as group:
        found = named(limits_after(f"echo $$ > {group}/cgroup.procs"), "memory")
    assert found.status == "wrong" and found.found.endswith("of 512 MiB")


def test_little_shared_memory(tmp_path):
    with small_disk(tmp_path / "shm", "64m"):  # what docker gives
        found = named(examine_limits(tmp_path / "shm"), "shared memory")
    assert found.status in ("note", "wrong"), "wrong where GPUs need it"
    assert found.found.startswith("64 MiB free of 64 MiB") and "--shm-size" in found.mend


def test_a_full_disk(tmp_path):
    with small_disk(tmp_path / "disk", "2m"):
        (tmp_path / "disk" / "large").write_bytes(bytes(2**21))
        findings = examine_disk(tmp_path / "disk" / "new" / "runs")
    assert named(findings, "disk").status == "wrong" and named(findings, "disk").found.startswith("0 B free of 2 MiB")
    assert named(findings, "writing").status == "wrong"
    assert named(findings, "writing").found.endswith("cannot be written: No space left on device")


def test_a_disk_without_inodes(tmp_path):
    with small_disk(tmp_path / "disk", "100m", inodes=3):
        for number in range(2):
            (tmp_path / "disk" / f"{number}").touch()
        findings = examine_disk(tmp_path / "disk")
    assert named(findings, "inodes").found.startswith("0 free of 3") and named(findings, "inodes").status == "wrong"
    assert named(findings, "writing").status == "wrong"


def test_a_disk_that_is_read_only(tmp_path):
    with small_disk(tmp_path / "disk", "10m") as remount:
        remount("ro")
        assert named(examine_disk(tmp_path / "disk"), "writing").found.endswith("Read-only file system")


def test_looking_at_a_disk_leaves_nothing(tmp_path):
    assert named(examine_disk(tmp_path / "runs"), "writing").status == "ok"
    assert list(tmp_path.iterdir()) == []
    assert existing(tmp_path / "a" / "b") == tmp_path
    (tmp_path / "runs").write_text("a file")
    assert named(examine_disk(tmp_path / "runs"), "writing").mend == "choose another --run-dir"


def installed(folder, name, version, requires=""):
    """What pip leaves of a package, found before those that are installed."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
    (info / "METADATA").write_text(lines)


@pytest.mark.parametrize(
    ("name", "version", "found", "mend"),
    [
        ("jax", "0.9.1", "jdp was tested with jax<0.13,>=0.10; installed is 0.9.1", "pip install 'jax<0.13,>=0.10'"),
        ("optax", "9.0", "jdp was tested with optax", "pip install 'optax"),
        ("jax-cuda13-plugin", "0.9.9", "jax-cuda13-plugin is 0.9.9, and jaxlib", "pip install 'jax[cuda13]=="),
    ],
)
def test_versions_that_do_not_match(name, version, found, mend, tmp_path, monkeypatch):
    installed(tmp_path, "jdp", "1", "Requires-Dist: jax<0.13,>=0.10\nRequires-Dist: optax>=0.2.8,<0.3\n")
    assert [each.status for each in examine_versions()] == ["ok"]
    monkeypatch.syspath_prepend(tmp_path)
    installed(tmp_path, name, version)
    (finding,) = examine_versions()
    assert finding.status == "wrong" and finding.found.startswith(found) and finding.mend.startswith(mend)


def test_a_package_that_is_missing(tmp_path, monkeypatch):
    installed(tmp_path, "jdp", "1", "Requires-Dist: no-such-package>=3\nRequires-Dist: torch>9; extra == 'torch'\n")
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = examine_versions()
    assert finding.found == "jdp needs no-such-package>=3, which is not installed"


# The network.


def test_own_name_without_an_address():
    """Gloo cannot start then: `jdp launch` fails, so it is wrong in a cluster, and alone a note."""
    script = "from jdp.launch.doctor.network import *; print(*examine_names({}, None), examine_names({}, cluster)[0])"
    script = f"from jdp.core.cluster.schedulers import Cluster; cluster = Cluster('x', 'n:1', 2, 0); {script}"
    done = shell("unshare", "-u", "bash", "-c", 'hostname no-such-host && exec "$0" -c "$1"', sys.executable, script)
    if "Operation not permitted" in done.stderr:
        pytest.skip("this process may not change its host's name")
    assert "'no-such-host' has no address" in done.stdout
    assert "status='note'" in done.stdout and "status='wrong'" in done.stdout and "/etc/hosts" in done.stdout


def test_nodes_and_interfaces_that_are_not_there():
    here = socket.gethostname()
    nodes, interface = examine_names(
        {"SLURM_STEP_NODELIST": f"{here},nosuchnode[1-2].invalid", "NCCL_SOCKET_IFNAME": "nosuch,none"}, None
    )[1:]
    assert nodes.status == "wrong"
    assert nodes.found.startswith("nosuchnode1.invalid, nosuchnode2.invalid of ")
    assert interface.status == "wrong" and interface.mend.startswith("unset NCCL_SOCKET_IFNAME, or name one of ")
    for given in ("lo", "=lo", "^docker", "l", "lo:0,eth9"):
        found = examine_names({"NCCL_SOCKET_IFNAME": given}, None)[1:]
        assert all(each.status == "ok" for each in found), given
    assert examine_names({"NCCL_SOCKET_IFNAME": "=l"}, None)[1].status == "wrong"


def test_loopback_is_there():
    assert examine_port().status == "ok"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def roll(processes, count, port, seconds):
    """Call the roll of these processes, each in a thread."""
    found: dict[int, Finding] = {}

    def one(process):
        found[process] = call_roll(Cluster("test", f"127.0.0.1:{port}", count, process), seconds)

    threads = [threading.Thread(target=one, args=(process,)) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_come_to_the_roll_and_the_port_is_free_again():
    port = free_port()
    found = roll([2, 1, 0], 3, port, 20)
    assert {each.status for each in found.values()} == {"ok"}
    assert found[0].found == f"127.0.0.1:{port} was reached by all 3 processes"
    socket.create_server(("127.0.0.1", port)).close()


def test_who_does_not_come_is_named():
    found = roll([0, 2], 4, free_port(), 2)
    assert found[2].status == "ok"
    assert found[0].status == "wrong" and found[0].found.endswith("was not reached by process 1, 3 of 4")


def test_process_0_does_not_come():
    (found,) = roll([1], 2, free_port(), 0.5).values()
    assert found.status == "wrong" and found.found.endswith("was not reached: Connection refused")


def test_the_port_is_taken():
    """By a program that takes connections and says nothing that process 1 waits for."""

    def answer():
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        thread = threading.Thread(target=answer)
        thread.start()
        first = roll([0], 2, port, 5)[0]
        other = roll([1], 2, port, 0.5)[1]
        thread.join()
    assert first.found == f"port {port} of 127.0.0.1:{port} is taken"
    assert first.mend.startswith(f"end what listens there (ss -ltnp | grep :{port})")
    assert other.status == "wrong"


def test_the_coordinators_name_has_no_address():
    found = call_roll(Cluster("test", "nosuchhost.invalid:1234", 2, 1), 0.3)
    assert found.status == "wrong" and "nosuchhost.invalid:1234 was not reached: " in found.found
    assert "give nosuchhost.invalid an address here" in found.mend


# What is printed.


def test_what_is_not_ok_is_told_once_with_its_processes():
    fine, bad, note = Finding("a", "ok", "1"), Finding("a", "wrong", "2", "mend it"), Finding("b", "note", "3", "look")
    examined = Examined(
        {0: [fine, note], 1: [bad], 2: [Finding("a", "wrong", "4", "mend it")]}, {0: "n0", 1: "n1", 2: "n1"}
    )
    assert examined.lines() == [
        "WRONG  a  2  [processes 1, 2]",
        "          → mend it",
        "note   b  3  [process 0 on n0]",
        "          → look",
    ]
    assert examined.wrong == 1
    well = Examined({0: [fine], 1: [Finding("a", "ok", "9")]}, {0: "n0", 1: "n1"})
    assert well.lines() == ["ok     a  1"] and well.wrong == 0


@pytest.mark.parametrize(
    ("code", "given", "found"),
    [
        ("import os; os.environ.get('NCCL_SHM_DISABLE') or __import__('time').sleep(60)", {}, ["NCCL_SHM_DISABLE"]),
        ("import os; 'NCCL_IB_DISABLE' in os.environ or 1 / 0", {"NCCL_P2P_DISABLE": "1"}, ["NCCL_IB_DISABLE"]),
        ("1 / 0", {}, []),
    ],
    ids=["hangs", "fails", "incurable"],
)
def test_the_way_of_nccl_that_is_at_fault(code, given, found, tmp_path, monkeypatch, capsys):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    started = time.monotonic()
    variables = cure(1.0, command=[sys.executable, "-S", "-c", code], rdma=tmp_path)
    assert variables == dict.fromkeys(found, "1") and time.monotonic() - started < 20
    tried = [line.rpartition(" with ")[2] for line in capsys.readouterr().err.splitlines()]
    together = "NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_IB_DISABLE=1"
    everything = ["NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1", "NCCL_IB_DISABLE=1", together]
    last = everything.index(f"{found[0]}=1") + 1 if found else 4
    assert tried == everything[len(given) : last]
