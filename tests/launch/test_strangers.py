"""Strangers at the doors that jdp opens: the rendezvous of `jdp launch` and the roll-call of `jdp doctor`.

They cost nobody anything: the right nodes beside them start. Everything here is on loopback and without JAX.
"""

import json
import resource
import socket
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest

from jdp.core.cluster.schedulers import Cluster
from jdp.launch import Nodes, door, launch, message_fields
from jdp.launch.doctor.network import call_roll
from jdp.launch.messages import LONGEST, Lost, Wire, WrongSecret, connect
from jdp.launch.rendezvous import Rendezvous
from jdp.launch.restarts import Restarts
from jdp.launch.secret import shared_secret

SECRET, OTHER = b"the secret of these nodes", b"the secret of other nodes"
FACTS = {"-n": "1"}
HELLO = b"jdp/1 %s open\n" % (b"0" * 32)
KINDS = pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "open"])


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()


class Served:
    """A rendezvous of two nodes, and what its clients do."""

    def __init__(self, folder, secret, rejoin_seconds=60.0):
        self.address, self.secret, self.wires = free_address(), secret, []
        nodes = Nodes(2, 0, "{}:{}".format(*self.address), rejoin_seconds=rejoin_seconds)
        restarts = Restarts(0, False, folder / "progress")
        self.rendezvous = Rendezvous(nodes, 1, restarts, lambda processes: True, FACTS, secret)

    def join(self, node, facts=FACTS, token=None, address=None):
        wire = connect(address or self.address, self.secret, 10)
        self.wires.append(wire)
        wire.send("join", node=node, facts=facts, token=token or ("" if node else self.rendezvous.token))
        return wire

    def starts(self):
        """The right nodes come, and start."""
        for rank, wire in enumerate([self.join(node) for node in (0, 1)]):
            assert [(message["kind"], message["first"]) for message in wire.wait(10)] == [("start", rank)]

    def close(self):
        for wire in self.wires:
            wire.close()


@pytest.fixture
def serve(tmp_path):
    """serve(secret): a rendezvous that serves, and ends with the test."""
    with ExitStack() as stack:

        def serve(secret, **settings):
            served = Served(tmp_path, secret, **settings)
            stack.enter_context(served.rendezvous)
            stack.callback(served.close)
            return served

        yield serve


def is_dropped(stranger, seconds=4.0):
    """The other side closes the connection; nothing but its hello and welcome came."""
    stranger.settimeout(seconds)
    came = b""
    with suppress(ConnectionResetError):
        while data := stranger.recv(1000):
            came += data
            assert came.count(b"\n") <= 2
    return True


def joining(node="1", facts='{"-n": "1"}', token='""', kind='"join"'):
    return f'{{"kind": {kind}, "node": {node}, "facts": {facts}, "token": {token}}}\n'.encode()


RUBBISH = {
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500,
    "Infinity": HELLO + joining("Infinity"),
    "NaN": HELLO + joining("NaN"),
    "a number beyond all": HELLO + joining("1e999"),
    "a negative number": HELLO + joining("-1"),
    "4000 digits": HELLO + joining("9" * 4000),
    "true": HELLO + joining("true"),
    "text for a number": HELLO + joining('"1"'),
    "no facts": HELLO + joining(facts="[]"),
    "facts in facts": HELLO + joining(facts='{"-n": {"-n": {}}}'),
    "colours of a terminal": HELLO + joining(facts='{"-n": "\\u001b[31m"}'),
    "long text": HELLO + joining(facts=f'{{"-n": "{"x" * 5000}"}}'),
    "an unknown kind": HELLO + joining(kind='"hello"'),
    "a kind that is none": HELLO + joining(kind="[]"),
    "a field too many": HELLO + b'{"kind": "stop", "node": 1}\n',
    "a field too few": HELLO + b'{"kind": "join"}\n',
    "deep": HELLO + b"[" * 60_000 + b"\n",
    "deeper": HELLO + b'{"a":' * 100_000 + b"\n",
    "bytes": HELLO + b"\xff\xfe\n",
    "hello again": HELLO + HELLO,
    "nothing but lines": b"\n" * 100_000,
}


@KINDS
def test_rubbish_is_dropped_and_costs_the_right_nodes_nothing(secret, serve):
    served = serve(secret)
    for name, text in RUBBISH.items():
        given = text if secret is None else text.replace(b" open\n", b" secret\n")
        with socket.create_connection(served.address, 10) as stranger:
            with suppress(OSError):
                stranger.sendall(given)
            assert is_dropped(stranger), name
    served.starts()


@KINDS
def test_a_gigabyte_without_a_line_is_read_no_further_than_a_message(secret, serve):
    served, chunk, sent = serve(secret), b"x" * (1 << 20), 0
    with socket.create_connection(served.address, 10) as stranger:
        stranger.settimeout(5)
        with suppress(OSError):
            stranger.sendall(HELLO if secret is None else HELLO.replace(b"open", b"secret"))
            while sent < 1 << 30:
                sent += stranger.send(chunk)
    assert sent < 100 * LONGEST, "what the kernel takes before it hears that nobody reads"
    served.starts()


@KINDS
def test_a_thousand_who_say_nothing_keep_nobody_out_and_are_dropped(secret, serve):
    served, (soft, hard) = serve(secret), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        with ExitStack() as stack:
            strangers = [stack.enter_context(socket.create_connection(served.address, 10)) for _ in range(1000)]
            served.starts()
            kept = served.rendezvous._door._strangers()
            assert len(kept) <= door.MOST_STRANGERS, "the oldest went at once"
            for client in kept:
                client.until = 0.0  # the time of the others is over
            assert all(map(is_dropped, strangers))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def overheard(address):
    """A place between a node and the rendezvous, which keeps what the node sends."""
    kept: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as middle:

        def carry(start, end, keep):
            with suppress(OSError):
                while data := start.recv(4096):
                    kept.extend([data] * keep)
                    end.sendall(data)
                end.shutdown(socket.SHUT_WR)

        def serve():
            with middle.accept()[0] as inner, socket.create_connection(address) as outer:
                back = threading.Thread(target=carry, args=(outer, inner, False))
                back.start()
                carry(inner, outer, True)
                back.join()

        thread = threading.Thread(target=serve)
        thread.start()
        yield middle.getsockname(), kept
        thread.join(10)


def test_what_was_overheard_opens_no_other_connection_and_counts_once(serve):
    served = serve(SECRET)
    with overheard(served.address) as (middle, kept):
        node = served.join(1, address=middle)
        assert served.join(0).wait(10)[0]["kind"] == "start" and node.wait(10)[0]["kind"] == "start"
        hello, join = b"".join(kept).splitlines(keepends=True)
        with socket.create_connection(served.address, 10) as stranger:
            stranger.sendall(hello + join)
            assert is_dropped(stranger), "the nonce of the rendezvous is another"
        node.connection.sendall(join)
        assert is_dropped(node.connection), "its number is the next"
        node.close()


def test_no_line_counts_in_the_other_direction(serve):
    """What the rendezvous signed, sent back to it, is no node's: its welcome, in place of a join."""
    served = serve(SECRET)
    with socket.create_connection(served.address, 10) as stranger:
        reader = stranger.makefile("rb")
        reader.readline()
        stranger.sendall(HELLO.replace(b"open", b"secret"))
        stranger.sendall(reader.readline())
        assert is_dropped(stranger)


@pytest.mark.parametrize(("here", "words"), [(OTHER, "its secret is another"), (None, "it has a secret, and this one")])
def test_without_the_secret_nobody_joins_and_both_sides_say_why(here, words, serve, capfd):
    served = serve(SECRET)
    for _ in range(3):
        with pytest.raises(WrongSecret, match=words):
            connect(served.address, here, 10)
    served.starts()
    said = "jdp launch: a supervisor on 127.0.0.1 was refused: it has another secret than this node, or none\n"
    assert capfd.readouterr().err == said, "once"


def test_a_server_without_the_secret_learns_nothing():
    """A node sends what it will run only to those who have proven that they know the secret."""
    came: list[bytes] = []

    def answer():
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"jdp/1 %s secret\n%s {}\n" % (b"0" * 32, b"0" * 64))
            while data := connection.recv(1000):
                came.append(data)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(WrongSecret):
            connect(server.getsockname(), SECRET, 10)
        thread.join(10)
    assert len(b"".join(came)) == len(HELLO) + 2


def test_other_facts_end_a_run_with_a_secret_and_without_one_only_who_has_them(serve, capfd):
    words = "-n must be the same on every node; node 1 has 9, others have 1"
    with_secret, without = serve(SECRET), serve(None)
    capfd.readouterr()
    first = with_secret.join(0)
    with_secret.join(1, {"-n": "9"})
    assert [(message["kind"], message["code"]) for message in first.wait(10)] == [("end", 78)]
    (end,) = without.join(1, {"-n": "9"}).wait(10)
    assert (end["kind"], end["code"], end["why"]) == ("end", 78, words)
    without.starts()
    said = capfd.readouterr().err.splitlines()
    assert said == [f"jdp launch: {words}", f"jdp launch: refused, as without a secret it may be a stranger: {words}"]


def test_a_node_that_was_started_otherwise_ends_the_run_when_no_other_comes(serve):
    served = serve(None, rejoin_seconds=1.0)
    first, other = served.join(0), served.join(1, {})
    assert other.wait(10)[0]["code"] == 78
    assert [(message["kind"], message["code"]) for message in first.wait(10)] == [("end", 78)]


@KINDS
def test_nobody_but_its_own_process_is_node_0(secret, serve):
    served = serve(secret)
    assert served.join(0, token="0" * 32).wait(10)[0]["kind"] == "taken"
    served.starts()


def test_a_node_stays_the_one_that_it_is(serve):
    served = serve(SECRET)
    served.join(1).send("join", node=0, facts=FACTS, token=served.rendezvous.token)
    assert served.join(0).wait(10)[0]["kind"] == "start"


def test_without_a_secret_the_rendezvous_says_so(serve, capfd):
    serve(SECRET)
    assert capfd.readouterr().err == ""
    served = serve(None)
    where = "{}:{}".format(*served.address)
    assert capfd.readouterr().err.startswith(f"jdp launch: whoever reaches {where} can join or end this run, as it has")


def test_the_processes_of_one_machine_get_a_secret_of_their_own(capfd, monkeypatch):
    monkeypatch.delenv("JDP_SECRET", raising=False)
    show = [sys.executable, "-c", "import os; print(len(os.environ['JDP_SECRET']))"]
    assert launch(show, 1) == 0 and capfd.readouterr().out == "[0] 64\n"


def roll(secrets, monkeypatch, seconds=20.0):
    """Call the roll of two processes with these secrets, beside strangers; return what both find."""
    port, found = free_address()[1], {}
    given = iter(secrets)
    monkeypatch.setattr("jdp.launch.doctor.network.shared_secret", lambda _: next(given))

    def call(process):
        found[process] = call_roll(Cluster("test", f"127.0.0.1:{port}", 2, process), seconds)

    with ExitStack() as stack:
        first = threading.Thread(target=call, args=(0,))
        first.start()
        strangers = 0
        while strangers < 20:
            with suppress(ConnectionRefusedError):
                stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                strangers += 1
                stranger.sendall(b"jdp doctor 1\n" * (strangers % 2))
        call(1)
        first.join()
    return found


def test_strangers_keep_nobody_from_the_roll_call(monkeypatch):
    start = time.monotonic()
    assert {each.status for each in roll([SECRET, SECRET], monkeypatch).values()} == {"ok"}
    assert time.monotonic() - start < 5


def test_another_secret_at_the_roll_call_is_named_on_both_sides(monkeypatch):
    found = roll([SECRET, OTHER], monkeypatch, seconds=1.5)
    assert found[1].found.endswith("was not reached: its secret is another") and "set JDP_SECRET" in found[1].mend
    assert found[0].mend.startswith("127.0.0.1 came with another secret, or none: set JDP_SECRET or JDP_SECRET_FILE")


def test_text_of_a_message_is_printable_and_short_and_what_differs_stays_different():
    assert message_fields.plain("a\x1b[31m\u202eb\n") == "a\ufffd[31m\ufffdb\ufffd"
    long = ["x" * 5000 + end for end in "ab"]
    assert len({message_fields.plain(text) for text in long}) == 2
    for text in (*long, "\udc80" * 2000):
        line = message_fields.encoded("join", {"node": 1, "facts": {"command": text}, "token": ""})
        assert json.loads(line) == message_fields.decoded(line) and len(line) < LONGEST


def test_secrets_come_from_a_variable_or_a_file_of_ones_own(tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o600)
    assert shared_secret({"JDP_SECRET_FILE": str(file)}) == shared_secret({"JDP_SECRET": SECRET.decode()}) == SECRET
    assert shared_secret({}) is None
    for mode in (0o640, 0o604, 0o620):
        file.chmod(mode)
        with pytest.raises(ValueError, match=r"its owner alone may read.*chmod 600"):
            shared_secret({"JDP_SECRET_FILE": str(file)})


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"JDP_SECRET": "short"}, "16 or more characters; given 5 in JDP_SECRET. Make one with: openssl"),
        ({"JDP_SECRET": ""}, "16 or more characters; given 0"),
        ({"JDP_SECRET": "x" * 16, "JDP_SECRET_FILE": "/f"}, "given both JDP_SECRET and JDP_SECRET_FILE"),
        ({"JDP_SECRET_FILE": "/nowhere/secret"}, "cannot be read: No such file or directory"),
        ({"JDP_SECRET_FILE": "/dev"}, "JDP_SECRET_FILE names a file"),
    ],
)
def test_a_secret_that_is_none_is_refused(environment, words):
    with pytest.raises(ValueError, match=words) as refused:
        shared_secret(environment)
    assert "x" * 16 not in str(refused.value)


def test_a_peer_that_left_is_lost():
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        with server.accept()[0] as ours:
            theirs.close()
            wire = Wire(ours, None, serves=True)
            with pytest.raises(Lost):
                [wire.wait(5) for _ in range(2)]
