"""Through the runs of a sweep, in order, and what came of each.

A run that its folder says is finished is not started again; one that was stopped resumes, as any run does; one that
failed is noted, and the sweep goes on, so a learning rate that is too high costs its own run only. A run that was
stopped by a signal stops the sweep: the same command goes on with it.
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
    """How a run that was started came to its end: an exit code as of `jdp train`, and the last thing that it said."""

    code: int
    said: str = ""


@dataclass(frozen=True)
class Result:
    """A run of the sweep and what came of it: DONE, FAILED, STOPPED or WAITING.

    Attributes:
        summary: that `jdp train` gave; None unless it is done.
        exit_code: of this visit's run; None for one that was not started.
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
    finished: Sequence[bool] | None = None,
) -> Iterable[Sequence[Result]]:
    """Run what is left to do, and yield the results so far, of all members in their order, after each.

    Args:
        members: the runs.
        runs: the folder that holds them.
        start: runs one to its end.
        say: shows a line of progress.
        finished: which ones are done before this begins; None: what their folders say.
    """
    before = [summary_of(member, runs) is not None for member in members] if finished is None else finished
    results = [Result(member, WAITING) for member in members]
    for number, (member, done) in enumerate(zip(members, before, strict=True)):
        place = f"[{number + 1}/{len(members)}] {member.name}"
        if done:
            say(f"{place}: done before")
            results[number] = Result(member, DONE, summary_of(member, runs))
        else:
            say(place)
            results[number] = _result(member, runs, start(member))
            if results[number].status == FAILED:
                say(f"{place} failed, exit code {results[number].exit_code}; the next visit tries it again")
        yield tuple(results)
        if results[number].status == STOPPED:
            return


def _result(member: Member, runs: Path, ended: Ended) -> Result:
    if ended.code in EXIT_CODES.values():
        return Result(member, STOPPED, exit_code=ended.code)
    if ended.code:
        return Result(member, FAILED, exit_code=ended.code, error=ended.said or f"exit code {ended.code}")
    return Result(member, DONE, summary_of(member, runs), exit_code=0)


def summary_of(member: Member, runs: Path) -> dict[str, Any] | None:
    """The summary that a finished run left in its folder; None where there is none, or it is of fewer steps."""
    file = runs / member.name / SUMMARY
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = isinstance(summary, dict) and summary.get("of_steps") == member.experiment.train.steps
    return summary if known else None
