"""Meetings of real processes: bounded, and who does not come is named."""

import re

import pytest

from jdp.core.cluster import barrier
from jdp.core.cluster.barrier import from_first_process, meet

PROGRAM = """
import time
import jax, jdp
from jdp.core.cluster.initialize import coordination_client
from jdp.core.cluster.barrier import LostPeer, from_first_process, meet

jdp.initialize(timeout_seconds=60)
rank = jax.process_index()
for _ in range(3):
    meet("a place")
keys = [key for key, _ in coordination_client().key_value_dir_get("jdp/meet/a place")]
print("kept", len(keys), flush=True)
print("heard", from_first_process("a number", 7 + rank), from_first_process("a word", f"from {rank}"), flush=True)
print("heard", from_first_process("a bit", rank == 0), flush=True)


def refused(call):
    try:
        call()
    except LostPeer as error:
        print("LostPeer", error, flush=True)


meet("before anyone is late")
if rank == 0:
    refused(lambda: meet("a place", seconds=0.5))
else:
    refused(lambda: from_first_process("a secret", 1, seconds=0.5))
meet("after")
"""


def test_barriers_name_who_does_not_come(together):
    code, out, error = together(PROGRAM)
    assert code == 0, out + error
    for rank in (0, 1):
        assert re.findall(rf"^\[{rank}\] heard (.*)$", out, re.MULTILINE) == ["7 from 0", "True"]
    kept = [int(count) for count in re.findall(r"kept (\d+)", out)]
    assert max(kept) <= 4, "keys of the meetings before are removed"
    assert (
        "[0] LostPeer All processes come to a place together; in 0.5 seconds process 1 did not. Each makes the same "
        "calls, in the same order, with batches of the same shapes: see the last output of the missing processes.\n"
        in out
    )
    assert "[1] LostPeer Process 0 did not send a secret in 0.5 seconds. See its last output.\n" in out


LEAVING = """
import os, signal, threading
import jax, jdp
from jdp.core.cluster.barrier import meet

jdp.initialize(timeout_seconds=60)


class Left(Exception):
    pass


def leave(*_):
    raise Left


signal.signal(signal.SIGUSR1, leave)
for number in range(30 * jax.process_index()):
    threading.Timer(0.03, os.kill, [os.getpid(), signal.SIGUSR1]).start()
    try:
        meet(f"place {number}")
    except Left:
        pass
meet("end")
print("came to the end", flush=True)
"""


@pytest.mark.rest
def test_leaving_barriers_by_exception_ends_normally(together):
    """Threads that wait on in C++ must not come back while Python ends: that aborts the process (134)."""
    code, out, error = together(LEAVING)
    assert code == 0 and out.count("came to the end") == 2, out + error


def test_alone_nobody_is_waited_for(monkeypatch):
    monkeypatch.setattr(barrier, "coordination_client", lambda: 1 / 0)
    meet("nowhere")
    assert from_first_process("a word", "mine") == "mine"
