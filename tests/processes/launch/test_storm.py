"""Twenty random signals to a run: every row is that of the calm run, once, and nothing is left behind.

The run is two processes of two devices each under `jdp launch`, with copies in memory every few steps, and a checkpoint
now and then.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from own_process import environment
from tiny_experiment import points_text, tables, write_points
from tiny_runs import rows

from jdp.launch.events import BEGINNINGS, read_logs

pytestmark = pytest.mark.slow
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT)
EVERY = 5  # steps between copies in memory
PAUSES = (0.0, 0.2, 1.0)  # seconds before the next signal, at most
PATIENCE_SECONDS = 300.0  # the machine may be busy
ENOUGH = 1_000_000  # steps: the storm ends the run, not its length
GUARD = {"deadline_seconds": 8, "keep_in_memory": EVERY}
TRAIN = {"batch_size": 16, "log_every": 1, "checkpoint_every": 200, "keep_checkpoints": 2}


def start(folder, cache, steps, log):
    """Start the launcher of a run in `folder`."""
    optimizer = {"name": "adamw", "lr": 0.01, "schedule": "constant"}
    text = tables(optimizer=optimizer, train={"steps": steps, **TRAIN}, guard=GUARD)
    write_points(folder, points_text(text, hidden=256, top='strategy = "zero1"\n'))
    options = ["-n", "2", "--devices-per-process", "2", "--max-restarts", "1000", f"--run-dir={folder}/runs"]
    own = environment(JDP_MEMORY_DIR=str(folder), JDP_CACHE_DIR=str(cache), JAX_PLATFORMS="cpu")
    streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
    command = [sys.executable, "-m", "jdp", "launch", *options, "--", f"{folder}/points.toml"]
    return subprocess.Popen(command, env=own, **streams)


def losses(folder):
    run = folder / "runs" / "points"
    return rows(run, "loss") if (run / "metrics.jsonl").exists() else {}


def ranks(launcher):
    """The process numbers of the run's ranks."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    return [int(each) for each in children.read_text().split()] if children.exists() else []


def repeated(events):
    """Steps that the last visit took again."""
    begin = max(i for i, each in enumerate(events) if each["event"] in BEGINNINGS)
    before = max((each["step"] for each in events[:begin] if each["event"] == "step"), default=0)
    return before - events[begin]["step"]


def test_a_storm_leaves_the_run_bit_for_bit(tmp_path):
    draw, sent, cache = random.Random(20261125), 0, tmp_path / "cache"
    folder, calm = tmp_path / "storm", tmp_path / "calm"
    folder.mkdir(), calm.mkdir()

    def events():
        return read_logs(folder / "runs" / "points" / "events", "rank").get(0, [])

    def wait_beyond(step, since):
        """Wait for a row after `step` in a visit that resumed after `since`; start an ended launcher again."""
        nonlocal launcher
        end = time.monotonic() + PATIENCE_SECONDS
        resumed = lambda: any(each["event"] in BEGINNINGS and each["time"] > since for each in events())  # noqa: E731
        while max(losses(folder), default=0) <= step or not resumed():
            if launcher.poll() is not None:
                launcher = start(folder, cache, ENOUGH, log)
            assert time.monotonic() < end, f"no row after step {step} in {PATIENCE_SECONDS:.0f} s"
            time.sleep(0.1)

    with (tmp_path / "log").open("ab") as log:
        launcher = start(folder, cache, ENOUGH, log)
        try:
            wait_beyond(0, 0.0)
            while sent < 20:
                time.sleep(draw.choice(PAUSES) * (0.5 + draw.random() / 2))
                alive, number, which = ranks(launcher), draw.choice(SIGNALS), draw.randrange(2)
                if len(alive) < 2:
                    continue
                before, began = max(losses(folder)), time.time()
                os.kill(alive[which], number)
                sent += 1
                wait_beyond(before, began)
                assert repeated(events()) <= 2 * EVERY, "the copy that was being written, and the one before it"
            launcher.terminate()
            launcher.wait(PATIENCE_SECONDS)
        finally:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
        time.sleep(1.0)
        left = subprocess.run(["pgrep", "-f", f"{folder}/points.toml"], capture_output=True, text=True, check=False)
        assert not left.stdout, "nobody is left behind"
        found = losses(folder)
        assert sorted(found) == list(range(1, max(found) + 1)), "a row is lost"
        # also of two processes: Gloo adds their parts in another order than one process
        assert start(calm, cache, max(found), log).wait() == 0
    assert found == losses(calm)
