"""The processes together, after they have joined: the same program, a shared folder, and the same time.

Every process calls each of these functions, in the same order. They communicate through the coordination service, which
answers while devices hang.
"""

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

import jax

from jdp.base.formatting import format_seconds, listed
from jdp.core.cluster.barrier import from_every_process, from_first_process, meet, named
from jdp.core.cluster.initialize import LostPeer, coordination_client
from jdp.core.cluster.tls import FILES as TLS_FILES
from jdp.launch.doctor.findings import Finding
from jdp.launch.doctor.versions import versions

SKEW_SECONDS = 1.0  # more makes of logs and file times a puzzle; jdp itself compares no clocks
_PINGS = 4
_FAILED = "jdp/doctor/failed"
_VISIBLE_SECONDS = 5.0  # within which a network file system shows what another host wrote
_SAME = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # variables that change the program
_PREFIXES = ("JAX_", "NCCL_")
_OWN = ("JAX_COORDINATOR_BIND_ADDRESS", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS", "NCCL_HOSTID", *TLS_FILES)


def compare(environment: Mapping[str, str], seconds: float) -> list[Finding]:
    """Compare versions, devices and variables of this process with those of process 0."""
    variables = {
        name: value
        for name, value in environment.items()
        if (name in _SAME or name.startswith(_PREFIXES)) and name not in _OWN
    }
    devices = jax.local_devices()
    here = {
        **versions(),
        "devices": str(len(devices)),
        "kind of devices": devices[0].device_kind,
        **variables,
    }
    everywhere = [json.loads(each) for each in from_every_process("versions", json.dumps(here), seconds=seconds)]
    first, mine = everywhere[0], everywhere[jax.process_index()]
    differing = [name for name in sorted({*first, *mine}) if first.get(name, "") != mine.get(name, "")]
    mend = "give all processes the same environment: one image, one virtual environment, the same srun or mpirun -x"
    if not differing:
        return [Finding("same everywhere", "ok", f"versions, devices and variables of {len(everywhere)} processes")]
    shown = "; ".join(
        f"{name} is {mine.get(name) or 'not set'}, and in process 0 {first.get(name) or 'not set'}"
        for name in differing[:5]
    )
    return [Finding("same everywhere", "wrong", shown, mend)]


def examine_shared(folder: Path, seconds: float) -> list[Finding]:
    """Have each process write a file into a folder, look for those of the others, and remove its own."""
    count, me = jax.process_count(), jax.process_index()
    token = from_first_process("the name of a shared file", secrets.token_hex(8), seconds=seconds)
    names = [f".jdp-doctor-{token}-{process:05d}" for process in range(count)]
    try:
        problem = _write(folder / names[me], token)
        hosts = set(from_every_process("shared files are written", socket.gethostname(), seconds=seconds))
        unseen = _unseen(folder, names, token)
        meet("shared files are read", seconds=seconds)
    finally:
        with contextlib.suppress(OSError):  # a file system that is mounted read-only refuses even where there is none
            (folder / names[me]).unlink(missing_ok=True)
    mend = "choose a folder that all hosts mount (NFS, Lustre, a ReadWriteMany volume): --run-dir FOLDER"
    if problem:
        return [Finding("shared folder", "wrong", f"{folder} cannot be written: {problem}", mend)]
    found = f"{folder}: each of {count} processes sees what the others wrote"
    found += "; all are on one host" if len(hosts) == 1 else ""
    if unseen:
        found = f"{folder} is not shared: files of {named(unseen)} cannot be seen"
    return [Finding.judged("shared folder", found, mend, wrong=bool(unseen))]


def _write(file: Path, text: str) -> str:
    """Write a file to the disk; return the error's text, or ""."""
    try:
        with file.open("w", encoding="ascii") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _unseen(folder: Path, names: list[str], token: str) -> list[int]:
    """Return the processes whose files do not appear, and this one's neighbour if its file has other content."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while True:
        try:
            present = {entry.name for entry in os.scandir(folder)}
        except OSError:
            present = set[str]()
        unseen = [process for process, name in enumerate(names) if name not in present]
        if not unseen or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    neighbour = (jax.process_index() + 1) % len(names)
    if neighbour not in unseen and not _reads(folder / names[neighbour], token):
        unseen.append(neighbour)
    return unseen


def _reads(file: Path, text: str) -> bool:
    try:
        return file.read_text(encoding="ascii") == text
    except (OSError, UnicodeError):
        return False


def examine_clocks(seconds: float) -> list[Finding]:
    """Compare this process' clock with process 0's, as NTP does: half of the round trip is the uncertainty."""
    offset, doubt = _ask(seconds * jax.process_count()) if jax.process_index() else _answer(seconds)
    told = from_every_process("clocks", json.dumps([offset, doubt]), seconds=seconds * jax.process_count())
    direction = "ahead of" if offset > 0 else "behind"
    found = f"{format_seconds(abs(offset))} ± {format_seconds(doubt)} {direction} process 0's"
    if jax.process_index() == 0:
        most = max(abs(each) + uncertain for each, uncertain in map(json.loads, told))
        found = f"all within {format_seconds(most)} of process 0's"
    mend = "as root, on both hosts: timedatectl set-ntp true (or start chronyd), then chronyc tracking"
    return [Finding.judged("clocks", found, mend, wrong=abs(offset) - doubt > SKEW_SECONDS)]


def _answer(seconds: float) -> tuple[float, float]:
    """Send this process' time to every other process, as often as it asks."""
    client = coordination_client()
    for process in range(1, jax.process_count()):
        for number in range(_PINGS):
            _get(client, f"jdp/doctor/ping/{process}/{number}", seconds, process)
            client.key_value_set(f"jdp/doctor/pong/{process}/{number}", repr(time.time()))
    return 0.0, 0.0


def _ask(seconds: float) -> tuple[float, float]:
    """Return the seconds by which this process' clock is ahead of process 0's, and their uncertainty."""
    client, me, best, offset = coordination_client(), jax.process_index(), float("inf"), 0.0
    for number in range(_PINGS):
        sent = time.time()
        client.key_value_set(f"jdp/doctor/ping/{me}/{number}", "")
        answer = float(_get(client, f"jdp/doctor/pong/{me}/{number}", seconds, 0))
        received = time.time()
        if number and received - sent < best:  # the first waits until process 0 comes to this one
            best, offset = received - sent, (sent + received) / 2 - answer
    return offset, best / 2


def _get(client: Any, key: str, seconds: float, process: int) -> str:
    """Return the value that a process sets for a key."""
    try:
        return client.blocking_key_value_get(key, int(1000 * seconds))
    except jax.errors.JaxRuntimeError as error:
        raise LostPeer(f"Process {process} tells its time; in {seconds:g} seconds it did not.") from error


def gather(findings: list[Finding], seconds: float) -> tuple[dict[int, list[Finding]], dict[int, str]]:
    """Return the findings and the host of every process, by its index."""
    text = json.dumps([socket.gethostname(), [astuple(each) for each in findings]])
    said = [json.loads(each) for each in from_every_process("what was found", text, seconds=seconds)]
    hosts = {process: host for process, (host, _) in enumerate(said)}
    return {process: [Finding(*each) for each in found] for process, (_, found) in enumerate(said)}, hosts


def tell_failure(finding: Finding) -> None:
    """Send a failure to process 0 at once: that may itself hang, and never call `gather`."""
    if (client := coordination_client()) is not None:
        client.key_value_set(f"{_FAILED}/{jax.process_index()}", json.dumps(astuple(finding)))


def told_failures() -> dict[int, Finding]:
    """Return the failures that processes sent by `tell_failure`."""
    client = coordination_client()
    entries = [] if client is None else client.key_value_dir_get(_FAILED)
    return {int(key.rpartition("/")[2]): Finding(*json.loads(text)) for key, text in entries}


def described(hosts: Mapping[int, str]) -> str:
    """Return "2 processes on node1", or "8 processes on 2 hosts: node1, node2"."""
    different = list(dict.fromkeys(hosts.values()))
    processes = "1 process" if len(hosts) == 1 else f"{len(hosts)} processes"
    if len(different) == 1:
        return f"{processes} on {different[0]}"
    return f"{processes} on {len(different)} hosts: {listed(different, 8)}"
