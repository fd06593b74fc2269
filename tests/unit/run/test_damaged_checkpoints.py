"""A run goes on over damaged checkpoints as long as one is whole, and comes to the same losses, bit for bit."""

import pytest
from damage import flip
from tiny_experiment import write_tiny
from tiny_runs import rows, train

from jdp.checkpoint import check

# Runs of a process each; `test_checkpoint_faults.py` has damage in one.
pytestmark = [pytest.mark.rest, pytest.mark.usefixtures("fresh_notices")]


TABLES = "[train]\nsteps = 6\nbatch_size = 8\nlog_every = 1\neval_every = 2\ncheckpoint_every = 2\n"


def losses(folder):
    return rows(folder, "loss", "grad_norm"), rows(folder, "eval_loss")


def test_a_run_resumes_from_the_newest_whole_checkpoint(tmp_path, capsys):
    file = write_tiny(tmp_path, TABLES)
    code, folder = train(file)
    assert code == 0
    want = losses(folder)
    checkpoints = file.parent / "runs" / "tiny" / "checkpoints"
    flip(max((checkpoints / "6").rglob("*"), key=lambda path: path.stat().st_size), 1000)
    (checkpoints / "4" / "state" / "manifest.ocdbt").unlink()
    code, folder = train(file)
    said = "".join(capsys.readouterr())
    assert code == 0 and losses(folder) == want
    assert "checkpoint 4 is damaged (state/manifest.ocdbt is missing) and set aside as damaged-4; 2 is read in" in said
    assert "checkpoint 6 is damaged (" in said and "resumed after step 2" in said
    names = sorted(path.name for path in checkpoints.glob("[!.]*"))
    assert names == ["2", "4", "6", "damaged-4", "damaged-6"]
    assert [found.status for found in check(folder)] == ["whole"] * 3
