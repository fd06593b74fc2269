"""Whether to start again after a failure, and with which exit code to end.

A crash loop is three failures without progress in between. One more failure at a step proves nothing: a checkpoint that
is written in the background is reported only at the next, or when the run has resumed from it.
"""

import signal
from dataclasses import dataclass, field
from pathlib import Path

from jdp.base.progress_file import read_progress
from jdp.launch.output import say

TRY_AGAIN, MISMATCH, SOFTWARE_ERROR, INTERRUPTED = 75, 78, 70, 130
FINAL = (1, 2, MISMATCH, INTERRUPTED, -signal.SIGINT)
"""Exit codes, or -n for signal n, after which another start would end the same way, or is not wanted."""

IN_VAIN = 2
"""Restarts in a row without progress after which there is no other."""


@dataclass
class Restarts:
    """Counts the restarts, and compares the run's progress between them."""

    most: int  # number of restarts allowed
    reports_progress: bool  # True if a program that has reported nothing has made no progress
    progress_file: Path  # the file in which the program reports its progress
    made: int = 0  # number of restarts so far
    _before: int | None = field(default=None)
    _in_vain: int = field(default=0)  # failures at `_before`, after the first
    _crash_loop: bool = field(default=False)

    def another(self, status: int) -> bool:
        """Decide after a failure, and report the decision; True: start again."""
        if self.most == 0 or status in FINAL:
            return False
        step = read_progress(self.progress_file)
        known = self.reports_progress or step is not None
        self._in_vain = self._in_vain + 1 if self.made and known and step == self._before else 0
        if self._in_vain == IN_VAIN:
            self._crash_loop = True
            where = f"after checkpoint {step}" if step else "before its first checkpoint"
            say(f"crash loop: failed {where} {IN_VAIN + 1} times in a row; not started again")
            return False
        if self.made >= self.most:
            say(f"not started again: {self.most} restart{'s' * (self.most > 1)} of {self.most} made (--max-restarts)")
            return False
        self.made, self._before = self.made + 1, step
        say(f"restart {self.made} of {self.most}{whence(step)}")
        return True

    def exit_code(self, status: int) -> int:
        """Return the exit code for that of the process that failed first; a crash loop must not be tried again."""
        code = 128 - status if status < 0 else status
        return SOFTWARE_ERROR if self._crash_loop and code == TRY_AGAIN else code


def whence(step: int | None) -> str:
    """Return the step that a restart resumes from, or a later one, as the end of a sentence."""
    return "" if step is None else f", from step {step}" if step else ", from the beginning"
