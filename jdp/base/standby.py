"""A process that waits, with everything imported, to take the place of one of a failed attempt (`jdp launch`)."""

import json
import os
import sys

VARIABLE = "JDP_STANDBY"
"""The environment variable of such a process; `launch.standby` starts it."""


def wait_for_turn() -> None:
    """Wait, in a standby, until an attempt needs it, or end with the launcher; in any other process return at once."""
    if os.environ.pop(VARIABLE, None) is None:
        return
    line = sys.stdin.readline()
    if not line:
        os._exit(0)  # the run came to its end without it
    for name, value in json.loads(line).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
