"""The findings of all processes, exchanged through the coordination service, which answers while devices hang."""

import json
import socket
from collections.abc import Mapping
from dataclasses import astuple

from jdp.base.formatting import listed
from jdp.core.cluster.barrier import from_every_process
from jdp.launch.doctor.findings import Finding


def gather(findings: list[Finding], seconds: float) -> tuple[dict[int, list[Finding]], dict[int, str]]:
    """Return the findings and the host of every process, by its index; every process calls this."""
    text = json.dumps([socket.gethostname(), [astuple(each) for each in findings]])
    said = [json.loads(each) for each in from_every_process("what was found", text, seconds=seconds)]
    hosts = {process: host for process, (host, _) in enumerate(said)}
    return {process: [Finding(*each) for each in found] for process, (_, found) in enumerate(said)}, hosts


def described(hosts: Mapping[int, str]) -> str:
    """Return "2 processes on node1", or "8 processes on 2 hosts: node1, node2"."""
    different = list(dict.fromkeys(hosts.values()))
    processes = "1 process" if len(hosts) == 1 else f"{len(hosts)} processes"
    if len(different) == 1:
        return f"{processes} on {different[0]}"
    return f"{processes} on {len(different)} hosts: {listed(different, 8)}"
