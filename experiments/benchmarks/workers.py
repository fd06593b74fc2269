"""Contenders that run in separate processes and take turns, so that settings of a whole process affect only one.

A worker reads lines, each a number of steps, and answers each with one JSON line: processor seconds of all its threads,
wall seconds, page faults, and the last loss. This module imports only Python's library, because workers may run under
different Pythons.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


def serve(step: Callable[[], float]) -> None:
    """In a worker: for each line of stdin run that number of steps, and print their cost; `step` returns its loss."""
    for line in sys.stdin:
        loss, wall, before = 0.0, time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        for _ in range(int(line)):
            loss = step()
        after = resource.getrusage(resource.RUSAGE_SELF)
        answer = {
            "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "wall": time.perf_counter() - wall,
            "faults": after.ru_minflt - before.ru_minflt,
            "mib": after.ru_maxrss / 1024,
            "loss": loss,
        }
        print(json.dumps(answer), flush=True)


@dataclass(frozen=True)
class Team:
    """The processes of one contender, which share its work."""

    name: str
    members: list[subprocess.Popen[str]]

    @classmethod
    def start(cls, name: str, commands: Sequence[tuple[list[str], dict[str, str]]]) -> "Team":
        """Start a process for each (command, variables to add to the environment), and run two steps."""
        members = [
            subprocess.Popen(
                command, env=os.environ | variables, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for command, variables in commands
        ]
        team = cls(name, members)
        team.run(2)
        return team

    def run(self, steps: int) -> dict[str, float]:
        """Run steps; return the mean cost of one: processor time and faults of all members, longest wall time."""
        for member in self.members:
            assert member.stdin is not None
            member.stdin.write(f"{steps}\n")
            member.stdin.flush()
        answers = [self._answer(member) for member in self.members]
        sums = {key: sum(answer[key] for answer in answers) for key in ("cpu", "faults", "mib")}
        return {
            "cpu": sums["cpu"] / steps,
            "faults": sums["faults"] / steps,
            "mib": sums["mib"],
            "wall": max(answer["wall"] for answer in answers) / steps,
            "loss": sum(answer["loss"] for answer in answers) / len(answers),
        }

    def _answer(self, member: subprocess.Popen[str]) -> dict[str, Any]:
        assert member.stdout is not None
        for line in member.stdout:
            if line.startswith('{"cpu"'):
                return json.loads(line)
        self.stop()
        raise SystemExit(f"{self.name} ended with exit code {member.wait()}; its message is above")

    def stop(self) -> None:
        """End the processes."""
        for member in self.members:
            member.kill()
            member.wait()
