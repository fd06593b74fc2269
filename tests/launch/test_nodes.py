"""Several machines, here several supervisors on one: who starts what, and what follows when one fails or is lost.

Programs without JAX, so that a start takes no time; `test_launch_faults.py` has an experiment.
"""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from own_process import start_python

from jdp.cli.launch import Options, _under_slurm
from jdp.launch import Nodes, launch
from jdp.launch.decisions import Member
from jdp.launch.door import Door
from jdp.launch.messages import split_address
from jdp.launch.process_environment import Part

WHO = """import os, signal, sys, time
rank, count, restarts = (int(os.environ[f"JDP_{name}"]) for name in ("PROCESS_ID", "NUM_PROCESSES", "RESTARTS"))
def wait_for(name):
    while not os.path.exists(f"{sys.argv[1]}/{name}"): time.sleep(0.02)
def mark(name): open(f"{sys.argv[1]}/{name}", "w").close()
"""
Process = subprocess.Popen
Start = Callable[..., "Process[str]"]


@pytest.fixture
def address():
    """A port of this machine that is free just now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def start(tmp_path, address):
    """Starts the supervisor of a node: start(rank, text, "--max-restarts=1", …, nodes=2). They share a secret."""
    started: list[Process[str]] = []

    def start(rank, text, *options, nodes=2, processes=2, secret="the secret of these nodes"):
        file = tmp_path / f"program{rank}.py" if "--own" in options else tmp_path / "program.py"
        file.write_text(WHO + text)
        command = ["-m", "jdp", "launch", f"-n={processes}", f"--nodes={nodes}", f"--node-rank={rank}"]
        command += [f"--coordinator={address}", *(option for option in options if option != "--own")]
        started.append(start_python(*command, "--", file, tmp_path, JDP_SECRET=secret))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ends(process, code):
    """Wait for a supervisor, check its exit code, and return its stdout and stderr."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, out + err
    return out, err


def wait_for(folder, *names):
    end = time.monotonic() + 60
    while time.monotonic() < end and not all((folder / name).exists() for name in names):
        time.sleep(0.02)
    assert all((folder / name).exists() for name in names), names


# In one write: a process that is ended may not have come to the second.
SAY = """
listens = os.environ['JAX_COORDINATOR_BIND_ADDRESS']
sys.stdout.write(f"{rank} {count} {restarts} {os.environ['JDP_COORDINATOR']} {listens}\\n")
"""
UP = "mark(f'up.{rank}'); time.sleep(60)"


def test_each_node_starts_its_part_of_one_cluster(start):
    """Node 1 is there first, and waits for node 0."""
    second, first = start(1, SAY), start(0, SAY)
    (one, _), (two, _) = ends(first, 0), ends(second, 0)
    lines = sorted(line.split() for line in (one + two).splitlines())
    assert [line[:4] for line in lines] == [[f"[{rank}]", str(rank), "4", "0"] for rank in range(4)]
    assert one.startswith(("[0]", "[1]")) and two.startswith(("[2]", "[3]"))
    addresses = {word for line in lines for word in line[4:]}
    assert len(addresses) == 1 and addresses.pop().startswith("127.0.0.1:"), "process 0 listens there only"


def test_a_failure_on_one_node_starts_all_of_them_again(start):
    text = SAY + "if restarts == 0:\n    if rank == 3: sys.exit(70)\n    time.sleep(60)"
    nodes = [start(rank, text, "--max-restarts=1") for rank in (0, 1)]
    (one, said), (two, told) = (ends(node, 0) for node in nodes)
    for rank, out in enumerate((one, one, two, two)):
        assert f"[{rank}] {rank} 4 1 " in out
    assert "jdp launch: restart 1 of 1\n" in said
    assert "jdp launch: process 3 of 4 ended with exit code 70. Its last output:" in told
    assert "restart 1: process 3 ended with exit code 70 on node 1 (" in told
    ports = {line.split()[4] for line in two.splitlines()}
    assert len(ports) == 2, "a restart takes another port"


def test_the_last_failure_ends_all_nodes_with_its_code_and_cause(start):
    nodes = [start(rank, "if rank == 3: sys.exit(9)\ntime.sleep(60)") for rank in (0, 1)]
    for node in nodes:
        assert "process 3 ended with exit code 9 on node 1 (" in ends(node, 9)[1].splitlines()[-1]


@pytest.mark.faults
def test_a_node_that_is_lost_and_comes_back_takes_part_again(start, tmp_path):
    text = SAY + f"if restarts == 0: {UP}"
    first, lost = (start(rank, text, "--max-restarts=1") for rank in (0, 1))
    wait_for(tmp_path, "up.0", "up.2")
    lost.kill()
    lost.communicate()
    back = start(1, text, "--max-restarts=1")
    (_, said), (two, _) = ends(first, 0), ends(back, 0)
    assert "[2] 2 4 1 " in two and "jdp launch: restart 1 of 1\n" in said


@pytest.mark.faults
def test_the_run_goes_on_without_a_node_that_stays_away(start, tmp_path):
    """Node 1 of three is lost: nodes 0 and 2 are numbered anew."""
    options = ("--max-restarts=1", "--min-nodes=1", "--rejoin-seconds=5")
    nodes = [start(rank, SAY + f"if restarts == 0: {UP}", *options, nodes=3) for rank in (0, 1, 2)]
    wait_for(tmp_path, *(f"up.{rank}" for rank in range(6)))
    nodes[1].kill()
    (one, said), (three, _) = ends(nodes[0], 0), ends(nodes[2], 0)
    assert "node 1 of 3 did not come within 5 seconds: going on with 2 of 3" in said
    assert "[0] 0 4 1 " in one and "[2] 2 4 1 " in three and "[4] 4 6 0 " in three


@pytest.mark.faults
def test_without_enough_nodes_it_ends_to_be_tried_again(start):
    _, said = ends(start(0, "", "--rejoin-seconds=1"), 75)
    assert said == "jdp launch: node 1 of 2 did not come within 1 seconds, and 2 are needed\n"


@pytest.mark.faults
def test_nodes_whose_node_0_is_lost_stop_and_look_for_it_again(start, tmp_path):
    text = SAY + f"if not os.path.exists(f'{{sys.argv[1]}}/again'): {UP}"
    first, second = (start(rank, text, "--max-restarts=1") for rank in (0, 1))
    wait_for(tmp_path, "up.0", "up.2")
    (tmp_path / "again").touch()
    first.kill()
    first.communicate()
    ends(start(0, text, "--max-restarts=1"), 0)
    two, told = ends(second, 0)
    assert "the connection to node 0 (127.0.0.1:" in told and two.count("[2] 2 4 0 ") == 2


def test_ctrl_c_on_one_machine_ends_the_run_on_all(start, tmp_path):
    text = f"signal.signal(signal.SIGINT, lambda *_: sys.exit(130)); {UP}"
    nodes = [start(rank, text, "--max-restarts=3") for rank in (0, 1)]
    wait_for(tmp_path, *(f"up.{rank}" for rank in range(4)))
    nodes[1].send_signal(signal.SIGINT)
    _, err = ends(nodes[1], 130)
    assert "ended with exit code 130, after SIGINT." in err
    nodes[0].send_signal(signal.SIGINT)  # as a terminal would; else it waits for its own processes, which may save
    _, said = ends(nodes[0], 130)
    assert "restart" not in said


DIFFERENT = {
    "processes": ({"processes": 3}, "-n must be the same on every node; node 1 has 3, others have 2"),
    "nodes": ({"nodes": 3}, "--nodes must be the same on every node; node 1 has 3, others have 2"),
    "program": ({}, "what is launched must be the same on every node; node 1 has "),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_nodes_that_were_not_started_alike_leave_with_the_same_words(case, start, address):
    other, words = DIFFERENT[case]
    first = start(0, "time.sleep(60)")
    listening(address)
    second = start(1, "", *["--own"] * (case == "program"), **other)
    for node in (first, second):
        _, err = ends(node, 78)
        assert words in err and err.count("\n") == 1


def listening(address):
    """Wait until node 0 listens; its own supervisor is then the first client, with which others are compared."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            socket.create_connection(split_address(address)).close()
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            time.sleep(1)
            return


def test_two_machines_with_one_number_and_one_with_another_secret_are_turned_away(start, tmp_path):
    """The others go on. `test_strangers.py` has whoever comes without jdp."""
    text = "mark(f'up.{rank}'); wait_for('go')"
    first, second = start(0, text), start(1, text)
    wait_for(tmp_path, "up.0", "up.3")
    same, other = start(1, text, "--rejoin-seconds=1"), start(1, text, "--rejoin-seconds=1", secret="another secret !")
    _, err = ends(same, 2)
    assert err.count("node 1 is here already, from 127.0.0.1: give each machine a --node-rank of its own") == 2
    _, err = ends(other, 2)
    refused = "cannot be joined: its secret is another; set JDP_SECRET or JDP_SECRET_FILE to the same everywhere\n"
    assert err.count(refused) == 2, "at once, and as its last word"
    (tmp_path / "go").touch()
    _, said = ends(first, 0)
    assert "jdp launch: a supervisor on 127.0.0.1 was refused: it has another secret than this node, or none\n" in said
    ends(second, 0)


@pytest.mark.parametrize("order", [("stop", "again", "start"), ("again", "start", "stop")])
def test_a_stop_that_comes_late_does_not_stop_the_next_attempt(order):
    """A node whose own process failed may have ended all of its processes before it is told to."""
    place = {"coordinator": "h:1", "processes": 2, "first": 1, "binds": False, "restarts": 1}
    told = {"stop": {}, "again": {"why": ""}, "start": place}
    with socket.create_server(("127.0.0.1", 0)) as server, Door(server, None) as door:
        nodes = Nodes(2, 1, "{}:{}".format(*server.getsockname()))

        def answer():
            while not (joined := [client for client, message in door.turn(5) if "kind" in message]):
                pass
            for kind in order:
                joined[0].wire.send(kind, **told[kind])

        thread = threading.Thread(target=answer)
        thread.start()
        with Member(nodes, 1, {}, None, None) as member:
            part = member.next_part([])
            assert isinstance(part, Part) and part.restarts == 1
            thread.join(10)
            assert member.stop(None) == (order[-1] == "stop")


def test_a_node_0_that_does_not_answer_is_named(start):
    _, err = ends(start(1, "", "--rejoin-seconds=1"), 75)
    assert "node 0 did not answer at 127.0.0.1:" in err and err.count("\n") == 1


def test_a_coordinator_that_is_taken_is_a_mistake(start, address):
    with socket.create_server(split_address(address)):
        _, err = ends(start(0, ""), 2)
    assert err.startswith("error: Node 0 listens at --coordinator; given 127.0.0.1:") and "ddress already in use" in err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((2, 2, "h:1"), "given --node-rank 2 of --nodes 2"),
        ((2, -1, "h:1"), "given --node-rank -1"),
        ((2, 0, "h"), "HOST:PORT"),
        ((2, 0, "h:0"), "port 1 to 65535"),
        ((2, 0, "h:1", 3), "--min-nodes is 1 to --nodes; given 3 of 2"),
        ((2, 0, "h:1", 1, float("nan")), "--rejoin-seconds"),
    ],
)
def test_nodes_that_cannot_be(given, words):
    with pytest.raises(ValueError, match=words):
        Nodes(*given)  # type: ignore[arg-type]


def test_an_address_may_be_of_the_sixth_version():
    assert split_address("[::1]:29500") == ("::1", 29500) and split_address("node0:1") == ("node0", 1)


FITTING = """
import sys
from jdp.launch import Nodes, launch
nodes = Nodes(4, int(sys.argv[1]), sys.argv[2], least=1, rejoin_seconds=float(sys.argv[3]))
command = [sys.executable, *sys.argv[4:]]
sys.exit(launch(command, 1, nodes=nodes, max_restarts=1, fits=lambda processes: processes != 3))
"""


@pytest.mark.faults
def test_nodes_that_the_batch_cannot_use_stand_by(tmp_path, address):
    """Of four nodes one is lost, and 3 processes do not divide the batch: two go on."""
    (tmp_path / "program.py").write_text(WHO + SAY + f"if restarts == 0: {UP}")
    own = [tmp_path / "program.py", tmp_path]
    started = [start_python("-c", FITTING, rank, address, "5", *own) for rank in range(4)]
    try:
        wait_for(tmp_path, *(f"up.{rank}" for rank in range(4)))
        started[1].kill()
        (one, said), (three, _), (four, told) = (ends(started[rank], 0) for rank in (0, 2, 3))
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert "node 1 of 4 did not come within 5 seconds: going on with 2 of 4" in said
    assert "[0] 0 2 1 " in one and "[1] 1 2 1 " in three and " 2 1 " not in four
    assert "this node stands by: the run goes on with fewer, which its mesh and batch allow" in told


def test_a_fault_of_the_rendezvous_ends_the_run_on_all(address, capsys):
    nodes = Nodes(2, 0, address, least=1, rejoin_seconds=0.2)
    assert launch([sys.executable, "-c", ""], 1, nodes=nodes, fits=lambda processes: processes < 1 // 0) == 70
    said = capsys.readouterr().err
    assert "the supervisors' rendezvous failed: ZeroDivisionError" in said and "in _gather" in said


SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
}


def test_a_slurm_step_of_one_task_on_each_machine_says_which_machines_there_are():
    options = _under_slurm(Options(8), SLURM)
    assert (options.nodes, options.node_rank, options.coordinator) == (2, 1, "gpu007:61441")
    for others in ({}, SLURM | {"SLURM_STEP_NUM_TASKS": "4"}, SLURM | {"SLURM_STEP_NUM_NODES": "1"}):
        assert _under_slurm(Options(8), others) == Options(8)
    given = Options(8, nodes=3, node_rank=2, coordinator="h:1")
    assert _under_slurm(given, SLURM) == given
