"""Who is missing is named, soon and at the end; processes of one attempt join; a node that has ended says so."""

import contextlib
import json
import socket
import threading
import time

import pytest

from jdp.core.cluster import roll_call
from jdp.core.cluster.agreement import Mismatch
from jdp.core.cluster.roll_call import MissingProcesses, RollCall

HOST = socket.gethostname()


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(autouse=True)
def noticed(monkeypatch):
    """What was printed; a wait is reported after half a second."""
    said = []
    monkeypatch.setattr(roll_call, "SAY_SECONDS", 0.5)
    monkeypatch.setattr(roll_call, "notice_anywhere", said.append)
    return said


class Caller(threading.Thread):
    """A process, or a node, that calls the roll; its error if it has one."""

    def __init__(self, *given, seconds=60.0):
        super().__init__(daemon=True)
        self.roll, self.seconds, self.error = RollCall(*given), seconds, None
        self.start()

    def run(self):
        try:
            self.roll.call(self.seconds)
        except (MissingProcesses, Mismatch) as error:
            self.error = error

    def end(self):
        self.join(100)
        assert not self.is_alive()
        return self.error


def ends(*callers):
    return [caller.end() for caller in callers]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_go_on_when_all_are_here(order, address):
    callers = []
    for number in order:
        callers.append(Caller(address, number, 3))
        time.sleep(0.2)
    assert ends(*callers) == [None] * 3
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(roll_call.split_address(address))


def test_missing_processes_are_named_everywhere(address, noticed):
    first, third = Caller(address, 0, 4, seconds=1.5), Caller(address, 2, 4, seconds=1.5)
    errors = ends(first, third)
    words = f"2 of 4 processes are here: processes 1 and 3 did not come to {address} within 1.5 seconds."
    assert all(isinstance(error, MissingProcesses) and str(error).startswith(words) for error in errors)
    assert errors[0].exit_code == 75 and noticed == ["2 of 4 processes are here: waiting for processes 1 and 3"]


def test_one_alone_is_told_whom_it_waits_for(address, noticed):
    assert "1 of 4 processes is here: processes 1, 2 and 3 did" in str(Caller(address, 0, 4, seconds=1).end())
    error = str(Caller(address, 3, 4, seconds=1).end())
    assert f"process 3 of 4 waited 1 seconds, and process 0 does not answer at {address} (Connection refused)" in error
    assert noticed[0] == "1 of 4 processes is here: waiting for processes 1, 2 and 3"
    assert noticed[1].startswith("process 3 of 4 is here: waiting, as process 0 does not answer at ")


def test_a_successor_counts_for_an_ended_process(address):
    first = Caller(address, 0, 3)
    with connected(address) as gone:
        gone.sendall(json.dumps({"unit": "process", "number": 1, "count": 3, "host": "h"}).encode())
        time.sleep(0.3)
    last = Caller(address, 2, 3)
    time.sleep(0.5)
    assert first.is_alive() and last.is_alive()
    assert ends(Caller(address, 1, 3), first, last) == [None] * 3


def connected(address):
    end = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(roll_call.split_address(address))
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.02)


def test_strangers_and_whatever_else_listens_are_passed_over(address):
    """As a coordinator of an attempt that has not ended: it closes the connection, or answers something else."""
    host, port = roll_call.split_address(address)
    with socket.create_server((host, port)) as other:
        second = Caller(address, 1, 3)
        first = Caller(address, 0, 3)
        for answer in (b"", b"PRI * HTTP/2.0"):
            connection, _ = other.accept()
            connection.sendall(answer)
            connection.close()
    with contextlib.ExitStack() as strangers:
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[1]", b'{"unit": "process"}'):
            with contextlib.suppress(OSError):
                strangers.enter_context(connected(address)).sendall(said)
        assert ends(first, second, Caller(address, 2, 3)) == [None] * 3


def test_a_taken_port_is_waited_for_and_named(address, noticed):
    with socket.create_server(roll_call.split_address(address)):
        error = str(Caller(address, 0, 2, seconds=1).end())
    assert error.startswith(f"port {address[10:]} of the coordinator is taken on {HOST}: end the program there")
    assert noticed[0] == f"port {address[10:]} of the coordinator is taken on {HOST}: waiting for it"


def test_other_numbers_end_all_with_the_same_words(address):
    errors = ends(Caller(address, 0, 4), Caller(address, 1, 6))
    words = "The number of processes must be the same everywhere; process 0 has 4, process 1 on "
    assert all(isinstance(error, Mismatch) and str(error).startswith(words) for error in errors), errors
    assert str(errors[0]) == str(errors[1])


def test_duplicate_numbers_are_told_to_the_first(address):
    first, one = Caller(address, 0, 3), Caller(address, 1, 3)
    time.sleep(0.5)
    other = Caller(address, 1, 3)
    assert "came twice: give each process its own number" in str(error := one.end()) and isinstance(error, Mismatch)
    assert ends(Caller(address, 2, 3), first, other) == [None] * 3


ENDED = "All processes must end together; those of node {} on {} have ended with exit code 0, and others were started"


def test_an_ended_node_tells_restarted_processes(address):
    errors = ends(Caller(address, 0, 4), Caller(address, 1, 2, "node"))
    assert all(isinstance(error, Mismatch) and str(error).startswith(ENDED.format(1, HOST)) for error in errors)


def test_node_0_says_so_and_waits(address):
    node = Caller(address, 0, 2, "node")
    error = Caller(address, 2, 4).end()
    assert isinstance(error, Mismatch) and str(error).startswith(ENDED.format(0, HOST))
    assert ends(Caller(address, 1, 2, "node"), node) == [None, None]
