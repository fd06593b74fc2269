"""A restart from the hosts' memory, in real processes: what a host lost with its memory comes from its neighbour.

Each process has a folder of its own for its host's memory. The run that is compared with is the same one, undisturbed.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from own_process import environment
from tiny_experiment import points_text, tables, train_here, write_points
from tiny_runs import rows

from jdp.launch import launch

pytestmark = pytest.mark.faults
TABLES = tables(
    optimizer={"name": "adamw", "lr": 0.01},
    train={"steps": 12, "batch_size": 16, "log_every": 1},
    guard={"keep_in_memory": 2},
)


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_host_is_lost_with_its_memory_and_two_steps_at_most(strategy, tmp_path, capfd):
    """Under `ddp` each host has all of it; nothing is sent."""
    write_points(tmp_path, points_text(TABLES, hidden=512, top=f'strategy = "{strategy}"\n'))
    faults = {"folder": str(tmp_path), "memory": f"{tmp_path}/memory", "0:1:9": "kill", "lost": "1:1"}
    faulty = [sys.executable, str(Path(__file__).with_name("faulty.py")), json.dumps(faults)]
    train = ["train", f"{tmp_path}/points.toml", f"--run-dir={tmp_path}/runs"]
    options = {"devices_per_process": 1, "reports_progress": True, "max_restarts": 1}
    assert launch([*faulty, *train], 2, environment=environment(), **options) == 0
    printed, said = capfd.readouterr()
    (resumed, size) = re.search(
        r"step (\d) is restored from the hosts' memory, (\S+) KiB of it from other", printed
    ).groups()
    (noted,) = re.search(r"jdp launch: restart 1 of 1, from step (\d)\n", said).groups()
    assert int(resumed) - int(noted) in (0, 2), "2 if it was killed between a copy and its note"
    assert int(resumed) >= 6 and float(size) > 0 and "storage has no checkpoint" in printed
    assert [file.name for file in tmp_path.glob("memory/*/*/*")] == [], "given back at the end"
    train_here(tmp_path / "points.toml", tmp_path / "whole", {}, devices=2)
    assert rows(tmp_path / "runs" / "points", "loss") == rows(tmp_path / "whole" / "points", "loss")
