"""Whether to restart after a failure, and the exit code otherwise.

A crash loop is three failures without progress in between. A second failure at a step proves nothing: a checkpoint
written in the background is reported only with the next one, or after the run has resumed from it.

Each of several nodes decides for itself. A process that fails before all have joined fails only on its node, and the
others wait for it (`core.cluster.roll_call`). Such restarts go on for some minutes and are not counted.
"""

import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from jdp.base.progress_file import JOINED, read_progress
from jdp.launch.output import say

TRY_AGAIN, MISMATCH, SOFTWARE_ERROR, INTERRUPTED = 75, 78, 70, 130
FINAL = (1, 2, MISMATCH, INTERRUPTED, -signal.SIGINT)
"""Exit codes, or -n for signal n, after which a restart would fail again, or is not wanted."""

IN_VAIN = 2
"""Largest number of restarts in a row without progress."""

PAUSE_SECONDS = 1.0
UNCOUNTED_SECONDS = 300.0
"""How long a node restarts processes that fail before all nodes have joined."""


@dataclass
class Restarts:
    """Counts the restarts, and compares the run's progress between them."""

    most: int  # number of restarts allowed
    reports_progress: bool  # True if a program without a report has made no progress
    folder: Path  # in which the processes report their progress
    several_nodes: bool = False  # True if there are other nodes
    made: int = 0  # number of restarts so far
    _until: float = field(default_factory=lambda: time.monotonic() + UNCOUNTED_SECONDS)
    _before: int | None = field(default=None)
    _in_vain: int = field(default=0)  # failures at `_before`, after the first
    _crash_loop: bool = field(default=False)

    def another(self, status: int) -> bool:
        """Decide after a failure, and report the decision; True: restart."""
        if self.most == 0 or status in FINAL:
            return False
        if self.several_nodes and not (self.folder / JOINED).exists():
            return self._uncounted(status)
        step = read_progress(self.folder)
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
        self._until = time.monotonic() + UNCOUNTED_SECONDS
        (self.folder / JOINED).unlink(missing_ok=True)
        say(f"restart {self.made} of {self.most}{whence(step)}")
        return True

    def _uncounted(self, status: int) -> bool:
        """Decide after a failure before all had joined; a process that timed out waiting has used up its time."""
        again = status != TRY_AGAIN and time.monotonic() < self._until
        if again:
            say("it failed before all processes had joined: started again, which is not counted")
            time.sleep(PAUSE_SECONDS)
        return again

    def exit_code(self, status: int) -> int:
        """Return the exit code, given that of the process that failed first; a crash loop must not be tried again."""
        code = 128 - status if status < 0 else status
        return SOFTWARE_ERROR if self._crash_loop and code == TRY_AGAIN else code


def whence(step: int | None) -> str:
    """Return the step from which, or after which, a restart resumes, as the end of a sentence."""
    return "" if step is None else f", from step {step}" if step else ", from the beginning"
