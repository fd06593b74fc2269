"""Children that cannot outlive their parent, even one that is killed outright (Linux)."""

import os
import sys
from collections.abc import Sequence

# Runs in each process before the program: ask the kernel to be killed when the parent dies. Between the fork and this
# line it may have died already, so look whose child we are. A separate program, as code between fork and exec in a
# process with threads (JAX has many) may deadlock.
_BOUND_TO_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this one is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def bound(command: Sequence[str]) -> list[str]:
    """`command`, to be started by the main thread of this process, so that it ends when this process does."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _BOUND_TO_PARENT, str(os.getpid()), *command]
