"""A storm: random signals at random times to random processes of a run, whose rows must be those of the calm run.

`PYTHONPATH=tests python tests/launch/storm.py --signals 300 --seed 7` prints a line a signal, and a summary. The run is
two processes of two devices each under `jdp launch`, with copies in memory every few steps, and a checkpoint now and
then.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from own_process import environment
from tiny_experiment import points_text, tables, write_points

from jdp.guard.flight_recorder import read_ranks

SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT)
EVERY = 5  # steps between copies in memory
PAUSES = (0.0, 0.2, 1.0)  # seconds before the next signal, at most
DEADLINE_SECONDS = 8
PATIENCE_SECONDS = 300.0  # the machine may be busy
ENOUGH = 1_000_000  # steps: the storm ends the run, not its length


@dataclass
class Seen:
    """What a storm did."""

    seed: int
    signals: list[str] = field(default_factory=list)
    recovered: list[float] = field(default_factory=list)  # seconds from a signal to a row of a later step
    repeated: list[int] = field(default_factory=list)  # steps that were logged, and taken again
    starts: int = 0  # of the launcher
    orphans: int = 0


def write(folder, steps, every):
    """Write the experiment; `every` 0 keeps nothing in memory."""
    guard = {"deadline_seconds": DEADLINE_SECONDS}
    text = tables(
        optimizer={"name": "adamw", "lr": 0.01, "schedule": "constant"},
        train={"steps": steps, "batch_size": 16, "log_every": 1, "checkpoint_every": 200, "keep_checkpoints": 2},
        guard=guard | ({"keep_in_memory": every} if every else {}),
    )
    write_points(folder, points_text(text, hidden=256, top='strategy = "zero1"\n'))


def command(folder, steps):
    launch = ["launch", "-n", "2", "--devices-per-process", "2", "--max-restarts", "1000", f"--run-dir={folder}/runs"]
    return [sys.executable, "-m", "jdp", *launch, "--", f"{folder}/points.toml", f"--train.steps={steps}"]


def rows(folder):
    """The losses of the run by step, and the last step; a half-written row is left out. No step may be there twice."""
    found = {}
    file = folder / "runs" / "points" / "metrics.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "loss" in row:
            assert row["step"] not in found, f"step {row['step']} twice"
            found[row["step"]] = row["loss"]
    return found


def ranks(launcher):
    """The process numbers of the run's ranks."""
    try:
        listed = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    except OSError:
        return []
    return [int(each) for each in listed]


def storm(folder, count, seed, kinds, pauses):
    """Send signals to a run until it has survived `count`, then end it by SIGTERM; return what was seen."""
    draw, seen = random.Random(seed), Seen(seed)
    own = environment(JDP_MEMORY_DIR=str(folder), JDP_CACHE_DIR=str(folder / "cache"), JAX_PLATFORMS="cpu")
    log = (folder / "log").open("ab")

    def start():
        seen.starts += 1
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        return subprocess.Popen(command(folder, ENOUGH), env=own, start_new_session=True, **streams)

    def wait_beyond(step, since):
        """Wait for a row after `step` in a visit that resumed after `since`; start an ended launcher again."""
        nonlocal launcher
        end = time.monotonic() + PATIENCE_SECONDS
        while last(folder) <= step or not _visits(folder, since):
            if launcher.poll() is not None:
                launcher = start()
            assert time.monotonic() < end, f"no row after step {step} in {PATIENCE_SECONDS:.0f} s"
            time.sleep(0.1)

    launcher = start()
    try:
        wait_beyond(0, 0.0)
        while len(seen.signals) < count:
            time.sleep(draw.choice(pauses) * (0.5 + draw.random() / 2))
            alive = ranks(launcher)
            number, which = draw.choice(kinds), draw.randrange(2)
            if len(alive) < 2:
                continue
            before, began = last(folder), time.time()
            os.kill(alive[which], number)
            seen.signals.append(f"{number.name} to {which} after step {before}")
            wait_beyond(before, began)
            seen.recovered.append(time.time() - began)
            seen.repeated.append(_repeated(folder))
            print(f"{seen.signals[-1]}: {seen.recovered[-1]:.1f} s, {seen.repeated[-1]} steps repeated", flush=True)
        stopped = last(folder)
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait(PATIENCE_SECONDS)
        seen.orphans = _orphans(folder)
        assert max(rows(folder)) >= stopped
        return seen
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
        log.close()


def last(folder):
    """The step of the last row, read off the end of the file."""
    file = folder / "runs" / "points" / "metrics.jsonl"
    if not file.exists():
        return 0
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - 5000))
        steps = re.findall(rb'{"step": (\d+),.*}\n', stream.read())
    return int(steps[-1]) if steps else 0


def _events(folder):
    return read_ranks(folder / "runs" / "points" / "flight").get(0, [])


def _visits(folder, since):
    """Of each visit of rank 0 that resumed after a time: the step that it resumed from."""
    return [each["step"] for each in _events(folder) if each["event"] == "resumed" and each["time"] > since]


def _repeated(folder):
    """Steps that the last visit took again."""
    events = _events(folder)
    begin = max(i for i, each in enumerate(events) if each["event"] == "resumed")
    before = max((each["step"] for each in events[:begin] if each["event"] == "step"), default=0)
    return max(0, before - events[begin]["step"])


def _orphans(folder):
    """Processes of the run that still live."""
    time.sleep(1.0)
    found = subprocess.run(["pgrep", "-f", f"{folder}/points.toml"], capture_output=True, text=True, check=False)
    return len([pid for pid in found.stdout.split() if int(pid) != os.getpid()])


def calm(folder, steps, every):
    """The same run without signals. Also of two processes: Gloo adds their parts in another order than one process."""
    other = folder / "calm"
    other.mkdir()
    write(other, steps, every)
    own = environment(JDP_MEMORY_DIR=str(other), JDP_CACHE_DIR=str(folder / "cache"), JAX_PLATFORMS="cpu")
    subprocess.run(command(other, steps), env=own, check=True, capture_output=True)
    return rows(other)


def run(folder, count, seed, *, kinds=SIGNALS, pauses=PAUSES, every=EVERY):
    """Compare a storm with its calm run; the rows must be equal bit for bit. Returns what was seen, as a dictionary."""
    write(folder, ENOUGH, every)
    seen = storm(folder, count, seed, kinds, pauses)
    found = rows(folder)
    steps = max(found)
    assert sorted(found) == list(range(1, steps + 1)), "a row is lost"
    wanted = calm(folder, steps, every)
    assert found == wanted, f"{sum(found[step] != wanted[step] for step in found)} rows differ"
    return {
        "seed": seed,
        "signals": count,
        "steps": steps,
        "starts": seen.starts,
        "seconds": [round(f(seen.recovered), 1) for f in (min, statistics.median, max)],
        "repeated": [f(seen.repeated) for f in (min, statistics.median, max)],
        "orphans": seen.orphans,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--signals", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(each.name for each in SIGNALS))
    parser.add_argument("--pause", type=float, help="seconds before each signal, at most")
    parser.add_argument("--every", type=int, default=EVERY, help="steps between copies in memory; 0: none")
    given = parser.parse_args()
    options = {"kinds": [signal.Signals[name] for name in given.kinds.split(",")], "every": given.every}
    options |= {"pauses": PAUSES if given.pause is None else (given.pause,)}
    with tempfile.TemporaryDirectory() as made:
        print(json.dumps(run(Path(made), given.signals, given.seed, **options)))
