"""Run the members of a sweep in order.

A run with a summary is not started again; a stopped one resumes. If a run fails, its error is recorded and the sweep
continues: a learning rate that is too high costs its own run only. A signal stops the run and the sweep; the same
command continues both.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jdp.run.folder import SUMMARY
from jdp.run.signals import EXIT_CODES
from jdp.run.sweep.grid import Member

DONE, FAILED, STOPPED, WAITING = "done", "failed", "stopped", "not run"


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        code: its exit code, as of `jdp train`.
        message: the last line that it printed on stderr.
    """

    code: int
    message: str = ""


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        member: the run.
        status: DONE, FAILED, STOPPED or WAITING.
        summary: the run's; None unless it is done.
        exit_code: the run's; None if it was not started in this visit.
        error: why it failed.
    """

    member: Member
    status: str
    summary: dict[str, Any] | None = None
    exit_code: int | None = None
    error: str = ""


def walk(
    members: Sequence[Member],
    runs: Path,
    start: Callable[[Member], Ended],
    *,
    say: Callable[[str], None],
) -> Iterable[Sequence[Result]]:
    """Run the members that are not done, and yield the results of all members, in order, after each run."""
    results = [Result(member, WAITING) for member in members]
    for number, member in enumerate(members):
        heading, before = f"[{number + 1}/{len(members)}] {member.name}", summary_of(member, runs)
        if before is not None:
            say(f"{heading}: done before")
            results[number] = Result(member, DONE, before)
        else:
            say(heading)
            results[number] = _result(member, runs, start(member))
            if results[number].status == FAILED:
                say(f"{heading} failed, exit code {results[number].exit_code}; the next visit tries it again")
        yield tuple(results)
        if results[number].status == STOPPED:
            return


def _result(member: Member, runs: Path, ended: Ended) -> Result:
    if ended.code in EXIT_CODES.values():
        return Result(member, STOPPED, exit_code=ended.code)
    if ended.code:
        return Result(member, FAILED, exit_code=ended.code, error=ended.message or f"exit code {ended.code}")
    return Result(member, DONE, summary_of(member, runs), exit_code=0)


def summary_of(member: Member, runs: Path) -> dict[str, Any] | None:
    """Return the summary in the folder of a finished run; None if there is none, or for another number of steps."""
    file = runs / member.name / SUMMARY
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    complete = isinstance(summary, dict) and summary.get("of_steps") == member.experiment.train.steps
    return summary if complete else None
