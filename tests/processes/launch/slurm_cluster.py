"""A real Slurm of two nodes on this machine, from Debian's packages, that ends with the test.

All of it (munged, slurmctld, two slurmd, and what they start) is in one PID namespace, whose first process holds it:
when that is killed, the kernel kills the rest. Its own /etc/hosts gives the nodes their names.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare", "nsenter")
NODES = ("n1", "n2")
HOLD = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def missing():
    """Why there can be no Slurm here; None if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"no Slurm: apt-get install slurm-wlm munge (no {absent[0]})"
    tried = subprocess.run([*HOLD, "true"], capture_output=True, text=True, timeout=20)
    if os.geteuid() != 0 or tried.returncode != 0:
        return f"a Slurm of this machine's own needs root {tried.stderr.strip()}"
    return None


CONFIG = """
ClusterName=jdp
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=5
KillWait=30
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_interval=2
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """The cluster. Its methods wait at most as long as they say."""

    def __init__(self, folder, first_process):
        self.folder = folder
        self.first_process = first_process
        self.daemons = []

    def run(self, *command, seconds=120, check=True, folder="."):
        """Run a command of Slurm's inside, in a folder, and return its output."""
        inside = self._inside(command, folder)
        done = subprocess.run(inside, capture_output=True, text=True, timeout=seconds, env=self._environment())
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, *command, **variables):
        """Start a daemon inside, in the foreground of nobody."""
        with (self.folder / f"{command[0]}.out").open("ab") as out:
            environment = self._environment() | variables
            inside = self._inside(command, self.folder)
            daemon = subprocess.Popen(inside, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment)
        self.daemons.append(daemon)

    def start_node(self, node):
        self.start("slurmd", "-D", "-N", node, "-f", f"{self.folder}/slurm.conf", JDP_TEST_NODE=node)

    def kill_node(self, node):
        """SIGKILL everything on a node at once, as when its power fails: its slurmd, the steps and their tasks."""
        marks = {f"JDP_TEST_NODE={node}".encode(), f"SLURMD_NODENAME={node}".encode()}
        mine = Path(f"/proc/{self.first_process}/ns/pid").readlink()
        for _ in range(2):  # what was being started too
            for path in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):  # it has ended
                    is_here = (path / "ns/pid").readlink() == mine
                    if is_here and marks & {*(path / "environ").read_bytes().split(b"\0")}:
                        os.kill(int(path.name), signal.SIGKILL)

    def wait_for(self, condition, seconds, what):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := condition():
                return found
            time.sleep(0.2)
        raise AssertionError(f"{what} did not come in {seconds} seconds\n{self.state()}")

    def state(self):
        logs = [path.read_text(errors="replace")[-3000:] for path in self.folder.glob("*.out")]
        return "\n".join([self.run("scontrol", "show", "job", check=False), self.run("sinfo", check=False), *logs])

    def job(self, number):
        """The job's record as a dictionary."""
        text = self.run("scontrol", "show", "job", str(number))
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)

    def _environment(self):
        return os.environ | {"SLURM_CONF": f"{self.folder}/slurm.conf"}

    def _inside(self, command, folder):
        return ["nsenter", f"--target={self.first_process}", "--mount", "--pid", f"--wd={folder}", "--", *command]


def free_ports(count):
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


@contextmanager
def slurm_cluster(folder):
    """A Slurm with the nodes n1 and n2, both idle. Its files, logs included, are in `folder`."""
    for name in ("state", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, ports=free_ports(3)))
    (folder / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()} {' '.join(NODES)}\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    # bash waits for processes that lost their parent too: Slurm takes a node whose dead ones linger out of service
    script = f"mount --bind {folder}/hosts /etc/hosts && echo ready && sleep 3600 & wait"
    holder = subprocess.Popen([*HOLD, "bash", "-c", script], stdout=subprocess.PIPE, text=True)
    daemons = []
    try:
        assert holder.stdout.readline() == "ready\n"
        first = int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0])
        cluster = SlurmCluster(folder, first)
        daemons = cluster.daemons
        places = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        munge = [f"--{name}={folder}/munge.{file}" for name, file in places.items()]
        cluster.start("munged", "--foreground", "--force", *munge)
        cluster.wait_for((folder / "munge.socket").exists, 120, "munged")
        cluster.start("slurmctld", "-D", "-f", f"{folder}/slurm.conf")
        for node in NODES:
            cluster.start_node(node)
        idle = lambda: cluster.run("sinfo", "-h", "-o", "%T %D", check=False).strip() == "idle 2"  # noqa: E731
        cluster.wait_for(idle, 120, "two idle nodes")
        yield cluster
    finally:
        holder.kill()
        for process in (holder, *daemons):
            process.wait()
        holder.stdout.close()
