"""A finding: what was looked at, whether it will do, what was found, and what mends it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "note", "wrong"]
"""A note is for the reader to judge, such as a limit that hurts large runs only; `wrong` makes the exit code 1."""


@dataclass(frozen=True)
class Finding:
    """What one check found in one process.

    Attributes:
        check: what was looked at, such as "open files".
        status: whether it will do.
        found: what was found, in words.
        mend: the line to type, or what to do; empty where nothing is to be mended.
    """

    check: str
    status: Status
    found: str
    mend: str = ""

    @classmethod
    def judged(cls, check: str, found: str, mend: str, *, wrong: bool = False, note: bool = False) -> "Finding":
        """Return a finding that is wrong or a note if that holds, and else ok, with nothing to mend."""
        status: Status = "wrong" if wrong else "note" if note else "ok"
        return cls(check, status, found, mend if wrong or note else "")


@dataclass(frozen=True)
class Examined:
    """What was found in all processes.

    Attributes:
        findings: of each process that could say it, by its index.
        hosts: the host of each of these processes.
    """

    findings: dict[int, list[Finding]]
    hosts: dict[int, str]

    @property
    def wrong(self) -> int:
        """How many things are wrong; one that is wrong in several processes counts once."""
        return sum(finding.status == "wrong" for finding, _ in self.rows())

    def rows(self) -> list[tuple[Finding, tuple[int, ...]]]:
        """Return a finding for each row of the table, with the processes that have it, in the order of the checks.

        Where a check is ok in all processes, the first's finding stands for all: free memory, for one, differs. What is
        not ok is told once for all processes in which the same mends it.
        """
        everyone = [(finding, process) for process, all_ in self.findings.items() for finding in all_]
        rows: list[tuple[Finding, tuple[int, ...]]] = []
        for check in dict.fromkeys(finding.check for finding, _ in everyone):
            found = [(finding, process) for finding, process in everyone if finding.check == check]
            unwell = [(finding, process) for finding, process in found if finding.status != "ok"]
            if not unwell:
                rows.append((found[0][0], tuple(self.findings)))
            told: dict[tuple[str, str], tuple[Finding, dict[int, None]]] = {}
            for finding, process in unwell:
                key = (finding.status, finding.mend or finding.found)
                told.setdefault(key, (finding, {}))[1][process] = None
            rows += [(finding, tuple(processes)) for finding, processes in told.values()]
        return rows

    def to_json(self) -> dict[str, Any]:
        """Return the object that `jdp doctor --json` prints."""
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
        """Return the table for people: a line a finding, and under what is not ok what mends it."""
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
