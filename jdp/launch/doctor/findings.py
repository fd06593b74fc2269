"""Findings of `jdp doctor`, of all processes, and their table.

They are exchanged through the coordination service, which works while devices hang."""

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any, Literal

from jdp.base.formatting import listed
from jdp.core.cluster.barrier import from_every_process

Status = Literal["ok", "note", "wrong"]
"""A note is left to the reader, such as a limit that hurts only large runs. `wrong` sets exit code 1."""


@dataclass(frozen=True)
class Finding:
    """The result of one check in one process, and the fix: a command or a sentence, "" if none is needed."""

    check: str
    status: Status
    found: str
    mend: str = ""

    @classmethod
    def judged(cls, check: str, found: str, mend: str, *, wrong: bool = False, note: bool = False) -> "Finding":
        """Return a finding: `wrong`, a `note`, or else ok and without a fix."""
        status: Status = "wrong" if wrong else "note" if note else "ok"
        return cls(check, status, found, mend if wrong or note else "")


@dataclass(frozen=True)
class Examined:
    """Findings and hosts of all processes that sent them, by process."""

    findings: dict[int, list[Finding]]
    hosts: dict[int, str]

    @property
    def wrong(self) -> int:
        """The number of faults; a fault of several processes counts once."""
        return sum(finding.status == "wrong" for finding, _ in self.rows())

    def rows(self) -> list[tuple[Finding, tuple[int, ...]]]:
        """Return a finding for each row of the table, with its processes, in the order of the checks.

        If a check is ok in all processes, the row has the first process' finding. Findings with the same fix share a
        row.
        """
        everyone = [(finding, process) for process, all_ in self.findings.items() for finding in all_]
        rows: list[tuple[Finding, tuple[int, ...]]] = []
        for check in dict.fromkeys(finding.check for finding, _ in everyone):
            found = [(finding, process) for finding, process in everyone if finding.check == check]
            unwell = [(finding, process) for finding, process in found if finding.status != "ok"]
            if not unwell:
                rows.append((found[0][0], tuple(self.findings)))
            grouped: dict[tuple[str, str], tuple[Finding, dict[int, None]]] = {}
            for finding, process in unwell:
                key = (finding.status, finding.mend or finding.found)
                grouped.setdefault(key, (finding, {}))[1][process] = None
            rows += [(finding, tuple(processes)) for finding, processes in grouped.values()]
        return rows

    def to_json(self) -> dict[str, Any]:
        return {
            "healthy": not self.wrong,
            "processes": len(self.findings),
            "findings": [
                {"process": process, "host": self.hosts[process], **asdict(finding)}
                for process, findings in self.findings.items()
                for finding in findings
            ],
        }

    def lines(self) -> list[str]:
        """Return the table as text: a line for each finding, followed by its fix if it is not ok."""
        rows = self.rows()
        width = max((len(finding.check) for finding, _ in rows), default=0)
        lines: list[str] = []
        for finding, processes in rows:
            who = "" if len(processes) == len(self.findings) else f"  [{_named(processes, self.hosts)}]"
            status = finding.status.upper() if finding.status == "wrong" else finding.status
            lines.append(f"{status:<5}  {finding.check:<{width}}  {finding.found}{who}")
            if finding.mend:
                lines.append(f"{'':<5}  {'':<{width}}  → {finding.mend}")
        return lines


def _named(processes: Sequence[int], hosts: dict[int, str]) -> str:
    """Return "process 1 on node2", or "processes 1, 2, 3 and 5 more"."""
    if len(processes) == 1:
        return f"process {processes[0]} on {hosts[processes[0]]}"
    first = ", ".join(map(str, processes[:4]))
    return f"processes {first}{f' and {len(processes) - 4} more' if len(processes) > 4 else ''}"


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
