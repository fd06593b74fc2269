"""`jdp why` on the command line."""

import json
from pathlib import Path

import pytest
from tiny_runs import refused

from jdp.cli.main import main
from jdp.launch.events import EventLog


@pytest.fixture
def run(tmp_path):
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "experiment.toml").write_text('name = "tiny"\n')
    return tmp_path / "runs" / "tiny"


def test_a_run_by_its_name(run, capsys):
    log = EventLog(run / "events" / "rank-00000.jsonl")
    log.event("start", rank=0, of=1)
    log.event("step", step=1, seconds=1.0)
    log.event("finished", step=1)
    log.close()
    assert main(["why", "tiny", "--run-dir", str(run.parent)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{run}: finished\nIt finished after step 1.\nGoodput ") and "errors.md" not in out
    assert main(["why", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["began"]) == ("finished", None)
    assert found["goodput"]["visits"] == 1 and found["words"][0] == "It finished after step 1."


def test_what_broke_leads_to_the_page_of_errors(run, capsys):
    """The path that is printed exists; a run that ended well has none."""
    log = EventLog(run / "events" / "rank-00000.jsonl")
    log.event("start", rank=0, of=1)
    log.event("finished", step=1)
    log.event("start", rank=0, of=1)
    log.event("failed", error="KeyError: one", at=["a.py:3 in f"], step=1)
    log.close()
    assert main(["why", str(run)]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert Path(last.rpartition(": ")[2]).read_text(encoding="utf-8").startswith("# Errors by their text")


def test_a_run_without_a_recorder(run, capsys):
    assert main(["why", str(run)]) == 0
    assert "has no log of a process" in capsys.readouterr().out


@pytest.mark.parametrize("given", ["tinny", "nothing/at/all", "~nosuchuser/run", "a\0b"])
def test_no_run_is_one_clear_error(run, capsys, given):
    error = refused(capsys, "why", given, "--run-dir", run.parent)
    assert error.count("\n") == 1
    assert given != "tinny" or "did you mean" in error
