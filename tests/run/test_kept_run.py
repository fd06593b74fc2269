"""A run that an earlier version of jdp made (`kept_run/`) resumes, and takes the steps that it took then."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny_experiment import train_here

from jdp.checkpoint.format.checksums import verify
from jdp.run.outputs.metrics import read

KEPT = Path(__file__).parent / "kept_run"


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Return the rows of the run before and after it was resumed, its summary, and its folder."""
    folder = tmp_path_factory.mktemp("kept") / "data"
    shutil.copytree(KEPT, folder)
    recorded = folder / "points" / "experiment.toml"
    recorded.write_text(recorded.read_text().replace('"/data/', f'"{folder}/'))
    before = read(folder / "points" / "metrics.jsonl")
    summary = train_here(folder / "points.toml", folder, {}, devices=2)
    return before, read(folder / "points" / "metrics.jsonl"), summary, folder / "points"


def test_a_run_of_an_earlier_version_resumes_with_the_same_rows(resumed):
    """Rounding may differ between processors and versions of XLA: three steps stay within 1e-5 of the rows kept."""
    before, after, summary, _ = resumed
    steps = [row for row in after if "loss" in row]
    kept = [row for row in before if "loss" in row]
    assert summary["resumed_from"] == 3
    assert summary["steps"] == 6
    assert [row["step"] for row in steps] == [row["step"] for row in kept] == [1, 2, 3, 4, 5, 6]
    assert steps[:3] == kept[:3]
    for name in ("loss", "grad_norm", "accuracy", "lr", "weight"):
        np.testing.assert_allclose([row[name] for row in steps], [row[name] for row in kept], rtol=1e-5, err_msg=name)
    assert after[-1]["eval_loss"] == pytest.approx(before[-1]["eval_loss"], rel=1e-5)


def test_the_files_of_an_earlier_version_are_continued(resumed):
    _, _, _, folder = resumed
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [(event["event"], event["step"]) for event in history[-2:]] == [("resumed", 3), ("finished", 6)]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["3", "6"]
    for step in (3, 6):
        assert verify(folder / "checkpoints" / str(step)).status == "whole"
