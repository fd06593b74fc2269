"""Two thousand steps with saves and evaluations: no growth of memory, files or threads."""

import json

import pytest
from own_process import python
from tiny_experiment import points_text, tables, write_points

# Two thousand steps; nothing else counts what they leak.
pytestmark = pytest.mark.rest


TRAIN = {"steps": 2000, "batch_size": 8, "log_every": 20, "eval_every": 100, "eval_batches": 2, "checkpoint_every": 100}
PROGRAM = """
import json, os, sys
from pathlib import Path
from jdp.cli.main import main
from jdp.guard.watch import Watch

folder, seen, real = Path(sys.argv[2]), {}, Watch.step


def step(self, done):
    if done // 100 in (10, 19) and done % 10 == 9:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        now = {
            "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
            "open files": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "entries": sum(len(names) for _, *lists in os.walk(folder / "points") for names in lists),
        }
        least = seen.setdefault(done // 100, now)
        seen[done // 100] = {kind: min(least[kind], number) for kind, number in now.items()}
    return real(self, done)


Watch.step = step
assert main(["train", sys.argv[1], "--run-dir", sys.argv[2], "--devices", "1"]) == 0
print("SEEN", json.dumps(seen))
"""


def test_two_thousand_steps_leak_nothing(tmp_path):
    """From the hundred steps after 1,000 to those after 1,900, nine saves and evaluations, memory grew by 1 to 4 MiB of
    430.

    The least of each hundred counts: a save that goes on in the background has threads, files and memory of its own
    as long as the disk takes, and the folder of a step has two dozen entries. (os.walk passes over what is deleted
    meanwhile.)
    """
    file = write_points(tmp_path, points_text(tables(train=TRAIN)))
    done = python("-c", PROGRAM, file, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout.rpartition("SEEN ")[2])
    first, last = seen["10"], seen["19"]
    for kind, more in {"threads": 9, "open files": 9, "entries": 60}.items():
        assert last[kind] < first[kind] + more, (kind, seen)
    assert last["bytes"] - first["bytes"] < 16 * 2**20, seen
