"""The network, before processes join: names without an address, missing interfaces, the coordinator's port.

JAX ends a process that cannot reach the coordinator, without an exception. So the roll is called first: process 0
listens on the coordinator's own port, and each other process sends its number there, in messages like those of the
rendezvous: strangers are dropped, and have no word if there is a secret. Missing processes are named. Then the port is
closed, and the coordinator opens it.
"""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Mapping

from jdp.base.formatting import listed
from jdp.base.machine import listen
from jdp.core.cluster.coordinator_address import host_of, listening_host
from jdp.core.cluster.schedulers import Cluster, slurm_hosts
from jdp.launch.doctor.findings import Finding
from jdp.launch.door import Client, Door
from jdp.launch.messages import SAME_SECRET, Lost, WrongSecret, connect
from jdp.launch.secret import shared_secret

_RETRY_SECONDS = 0.1
_ANSWER_SECONDS = 2.0
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def examine_names(environment: Mapping[str, str], cluster: Cluster | None) -> list[Finding]:
    """Check this host's own name, those of the job's nodes, and interfaces named in variables."""
    return [_own_name(cluster), *_node_names(environment), *_interfaces(environment)]


def _own_name(cluster: Cluster | None) -> Finding:
    name = socket.gethostname()
    mend = f"as root: echo 'ADDRESS {name}' >> /etc/hosts, or fix DNS"
    try:
        addresses = _addresses(name)
    except (OSError, UnicodeError) as error:
        found = f"{name!r} has no address ({_reason(error)}), which Gloo needs between processes"
        return Finding.judged("own name", found, mend, wrong=cluster is not None, note=True)
    return Finding("own name", "ok", f"{name} is {listed(addresses)}")


def _node_names(environment: Mapping[str, str]) -> list[Finding]:
    """Look up the nodes of a Slurm job: the coordinator's name comes from that list."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        return []
    names = list(slurm_hosts(nodes))
    lost = [name for name in names if not _resolves(name)]
    if not lost:
        return [Finding("node names", "ok", f"all {len(names)} of {nodes} have an address")]
    mend = "add them to DNS, or on every node to /etc/hosts: NodeName and NodeAddr are in scontrol show node"
    return [Finding("node names", "wrong", f"{listed(lost)} of {nodes} have no address on this host", mend)]


def _interfaces(environment: Mapping[str, str]) -> list[Finding]:
    """Check the interfaces that variables name: NCCL's are prefixes, "^" excludes, "=" is exact."""
    present = sorted(name for _, name in socket.if_nameindex())
    findings: list[Finding] = []
    for variable in _INTERFACES:
        given = environment.get(variable, "")
        if not given or given.startswith("^"):
            continue
        words = [word.partition(":")[0] for word in given.removeprefix("=").split(",")]
        exact = given.startswith("=") or variable.startswith("GLOO")
        fits = any(name == word if exact else name.startswith(word) for word in words for name in present)
        mend = f"unset {variable}, or name one of {', '.join(present)}"
        none = "" if fits else "; there is none"
        findings.append(Finding.judged("interfaces", f"{variable}={given}{none}", mend, wrong=not fits))
    return findings


def examine_port() -> Finding:
    """Bind a port on loopback, as the coordinator of processes on one machine does, and connect to it."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            pass
    except OSError as error:
        return Finding(
            "ports", "wrong", f"loopback: {_reason(error)}", "ip link set lo up; a firewall must let it pass"
        )
    return Finding("ports", "ok", "loopback can be bound and reached")


# The roll call.


def call_roll(cluster: Cluster, seconds: float) -> Finding:
    """Connect all processes at the coordinator's port, before JAX takes it."""
    assert cluster.coordinator is not None and cluster.num_processes is not None and cluster.process_id is not None
    deadline = time.monotonic() + seconds
    try:
        secret = shared_secret(os.environ)
    except ValueError as error:
        return Finding("coordinator", "wrong", str(error))
    if cluster.process_id:
        return _report(cluster.coordinator, cluster.process_id, deadline, secret)
    return _receive(cluster.coordinator, cluster.num_processes, deadline, secret)


def _receive(address: str, count: int, deadline: float, secret: bytes | None) -> Finding:
    """Receive the numbers of the other processes on the port of process 0."""
    port, missing = int(address.rpartition(":")[2]), set(range(1, count))
    try:
        with listen(listening_host(address), port) as server, Door(server, secret) as door:
            wrong = _noted(door, missing, deadline)
    except OSError as error:
        mend = (
            f"end what listens there (ss -ltnp | grep :{port}), or set JAX_COORDINATOR_PORT or JDP_COORDINATOR for all"
        )
        taken = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be bound: {_reason(error)}"
        return Finding("coordinator", "wrong", f"port {port} of {address} {taken}", mend)
    if not missing:
        return Finding("coordinator", "ok", f"{address} was reached by all {count} processes")
    lost = listed([str(process) for process in sorted(missing)], 8)
    mend = f"see their own output; were they started, and may they pass a firewall to {address}?"
    if wrong:
        mend = f"{listed(sorted(wrong))} came with another secret, or none: {SAME_SECRET}"
    return Finding("coordinator", "wrong", f"{address} was not reached by process {lost} of {count}", mend)


def _noted(door: Door, missing: set[int], deadline: float) -> set[str]:
    """Remove the processes that come from `missing`; return hosts whose secret is another.

    Each closes its connection when it has its answer, and is waited for: the port is then free at once.
    """
    wrong: set[str] = set()
    answered: list[Client] = []
    while (missing or answered) and (left := deadline - time.monotonic()) > 0:
        if not missing:
            deadline = min(deadline, time.monotonic() + _ANSWER_SECONDS)
        for client, message in door.turn(min(left, _RETRY_SECONDS)):
            if isinstance(message, WrongSecret) and len(wrong) < 8:
                wrong.add(client.host)
            elif not isinstance(message, Lost) and message["kind"] == "here" and client in door.clients:
                with contextlib.suppress(Lost):
                    client.wire.send("noted")
                    missing.discard(message["process"])
                    answered.append(client)
        answered = [client for client in answered if client in door.clients]
    return wrong


def _report(address: str, process: int, deadline: float, secret: bytes | None) -> Finding:
    """Send this process' number to process 0, again and again until it answers."""
    host, port, problem = host_of(address), int(address.rpartition(":")[2]), "there was no time"
    mend = f"start process 0; give {host} an address here; let a firewall pass port {port} between the hosts"
    while time.monotonic() < deadline:
        try:
            wire = connect((host, port), secret, _ANSWER_SECONDS)
            with wire.connection:
                wire.send("here", process=process)
                if any(message["kind"] == "noted" for message in wire.wait(_ANSWER_SECONDS)):
                    return Finding("coordinator", "ok", f"{host}:{port} was reached")
                problem = "something else listens there"
        except WrongSecret as wrong:
            problem, mend = str(wrong), SAME_SECRET
        except (OSError, UnicodeError) as error:
            if mend != SAME_SECRET:  # else process 0 has given up by now
                problem = _reason(error)
        time.sleep(_RETRY_SECONDS)
    return Finding("coordinator", "wrong", f"process 0 at {host}:{port} was not reached: {problem}", mend)


def _addresses(name: str) -> list[str]:
    return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})


def _resolves(name: str) -> bool:
    try:
        return bool(_addresses(name))
    except (OSError, UnicodeError):
        return False


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
