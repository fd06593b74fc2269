"""`jdp` with faults: `python faulty.py FAULTS COMMAND …`, FAULTS being JSON such as {"1:0:7": "kill"}.

That is: after restart 1, process 0 kills itself once step 7 is dispatched. It writes down when, in FAULTS["folder"].
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from jdp.cli.main import main
from jdp.run.outputs import Display

FAULTS = json.loads(sys.argv[1])
WHO = f"{os.environ['JDP_RESTARTS']}:{os.environ['JDP_PROCESS_ID']}"
_step = Display.step


def step(display, done):
    what = FAULTS.get(f"{WHO}:{done}", "")
    if what:
        Path(f"{FAULTS['folder']}/{WHO}").write_text(str(time.monotonic()))
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "kill the node":  # its supervisor, and so all its processes
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    if what.startswith("wait for "):
        while not Path(what.removeprefix("wait for ")).exists():
            time.sleep(0.02)
    _step(display, done)


if __name__ == "__main__":
    Display.step = step
    sys.exit(main(sys.argv[2:]))
