"""Several machines, here several supervisors on one: who starts what, and what follows when a process of one fails.

`test_two_hosts.py` has machines with addresses of their own, and experiments.
"""

import socket
import subprocess

import pytest
from own_process import start_python

from jdp.launch import Nodes

WHO = """import os, signal, sys, time
rank, count, restarts = (int(os.environ[f"JDP_{name}"]) for name in ("PROCESS_ID", "NUM_PROCESSES", "RESTARTS"))
def mark(name): open(f"{sys.argv[1]}/{name}", "w").close()
def marked(name): return os.path.exists(f"{sys.argv[1]}/{name}")
"""
JOIN = """
import jdp
jdp.initialize(timeout_seconds=60)
"""
MAIN = """
import sys, jdp.launch.supervisor
from jdp.cli.main import main
jdp.launch.supervisor.END_SECONDS = 15
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def start(tmp_path):
    """Starts the supervisor of a node: start(rank, text, "--max-restarts=1", …); a node has one process."""
    started: list[subprocess.Popen[str]] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

    def start(rank, text, *options, processes=1):
        (tmp_path / "program.py").write_text(WHO + text)
        where = [f"-n={processes}", "--nodes=2", f"--node-rank={rank}", f"--coordinator={address}"]
        program = ["--", tmp_path / "program.py", tmp_path]
        started.append(start_python("-c", MAIN, "launch", *where, *options, *program, JAX_PLATFORMS="cpu"))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ends(process, code):
    """Wait for a supervisor, check its exit code, and return its stdout and stderr."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, out + err
    return out, err


def test_each_node_starts_its_part_of_one_cluster(start):
    """A program that does not join is not waited for."""
    say = "sys.stdout.write(f\"{rank} {count} {restarts} {os.environ['JDP_COORDINATOR']}\\n\")"
    second, first = start(1, say, processes=2), start(0, say, processes=2)
    (one, _), (two, _) = ends(first, 0), ends(second, 0)
    lines = sorted(line.split() for line in (one + two).splitlines())
    assert [line[:4] for line in lines] == [[f"[{rank}]", str(rank), "4", "0"] for rank in range(4)]
    assert one.startswith(("[0]", "[1]")) and two.startswith(("[2]", "[3]"))
    assert len({line[4] for line in lines}) == 1


FAST = (
    JOIN
    + """
if restarts == 0:
    if rank == 0: time.sleep(12)  # it notices late: its coordinator lives when node 1 starts again
    os._exit(70)
sys.stdout.write(f"{rank} joined again, {restarts}\\n")
"""
)


@pytest.mark.rest
def test_restarted_nodes_await_the_old_coordinators_end(start):
    nodes = [start(rank, FAST, "--max-restarts=1") for rank in (0, 1)]
    for rank, node in enumerate(nodes):
        out, err = ends(node, 0)
        assert f"[{rank}] {rank} joined again, 1\n" in out and "jdp launch: restart 1 of 1\n" in err


EARLY = 'if rank == 1 and not marked("failed"): mark("failed"); os._exit(9)\n' + JOIN
EARLY += "sys.stdout.write(f'{rank} joined, {restarts}\\n')"


@pytest.mark.rest
def test_failures_before_joining_are_not_counted(start):
    nodes = [start(rank, EARLY, "--max-restarts=1") for rank in (0, 1)]
    (one, said), (two, told) = (ends(node, 0) for node in nodes)
    assert "[0] 0 joined, 0\n" in one and "[1] 1 joined, 0\n" in two and "failed" not in said
    assert "it failed before all processes had joined: started again, which is not counted" in told


BOTH = "import jdp\nmark(f'here {rank}')\nwhile not marked(f'here {1 - rank}'): time.sleep(0.02)\n"


def test_an_absent_node_is_named(start):
    out, err = ends(start(0, BOTH + JOIN.replace("60", "2"), "--max-restarts=3", processes=2), 75)
    assert "2 of 4 processes are here: processes 2 and 3 did not come to 127.0.0.1:" in out
    assert "restart" not in err and "not counted" not in err


LEFT = JOIN + "time.sleep(3); os._exit(70 * rank)"


@pytest.mark.rest
def test_a_finished_node_tells_restarted_ones(start):
    """Node 0; that node 1 does so too is in `test_roll_call.py`."""
    nodes = [start(rank, LEFT, "--max-restarts=3") for rank in (0, 1)]
    ends(nodes[0], 0)
    out, err = ends(nodes[1], 78)
    assert "All processes must end together; those of node 0 on " in out
    assert err.count("jdp launch: restart ") == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((2, 2, "h:1"), "given --node-rank 2 of --nodes 2"),
        ((2, 0, "h:0"), "port from 1 to 65535"),
        ((2, 0, "::1:29500"), r"Write \[::1\]:29500"),
    ],
)
def test_nodes_that_cannot_be(given, words):
    with pytest.raises(ValueError, match=words):
        Nodes(*given)
