"""Child processes that end with their parent, even if it is killed with SIGKILL (Linux)."""

import os
import sys
from collections.abc import Sequence

# Runs in each process before the program: it asks the kernel to kill the process when the parent dies. The parent may
# have died before that call, so its number is compared. It is a separate program: code between fork and exec in a
# process with threads (JAX has many) may deadlock.
_PRELUDE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this one is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` and ends with this process; start it from the main thread."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _PRELUDE, str(os.getpid()), *command]
