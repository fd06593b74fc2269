"""What `jdp why` says of logs of every kind: who began it, in words."""

import json
from pathlib import Path

import pytest
from tiny_runs import refused

from jdp.cli.main import main
from jdp.guard.diagnosis import diagnose

NOW = 10_000.0


def event(time, name, **values):
    return {"time": time, "event": name, **values}


def loop(rank, *, of=2, began=1000.0, steps=20, seconds=1.0, **parts):
    """The log of a process that starts, restores and takes steps."""
    events = [
        event(began + 5, "start", rank=rank, of=of, pid=1, host=f"host{rank}", began=began),
        event(began + 6, "begin", doing="restore", step=0),
        event(began + 7, "end", doing="restore", step=0, seconds=1.0),
        event(began + 8, "resumed", step=0),
        event(began + 8, "begin", doing="compile", step=1),
    ]
    parts = {"data": 0.0, "dispatch": 0.01, "wait": 0.9, "host": 0.01} | parts
    return [
        *events,
        *(event(began + 8 + seconds * i, "step", step=i, seconds=seconds, **parts) for i in range(1, steps + 1)),
    ]


def asked(tmp_path, *logs, supervisor=(), alive=(), now=NOW):
    (tmp_path / "events").mkdir()
    names = {"node-00000": supervisor} | {f"rank-{rank:05}": log for rank, log in enumerate(logs)}
    for name, events in names.items():
        text = "".join(json.dumps(one) + "\n" for one in events)
        (tmp_path / "events" / f"{name}.jsonl").write_text(text)
    return diagnose(tmp_path, now=now, lives=lambda seen, now: seen.rank in alive)


def test_it_finished(tmp_path):
    end = [event(1028.5, "late", step=20, words="Process 1 is late."), event(1029.0, "finished", step=20)]
    found = asked(tmp_path, *([*loop(rank), *end] for rank in (0, 1)))
    assert (found.state, found.began, found.words[0]) == ("finished", None, "It finished after step 20.")
    assert "Process 1 is late." in found.words
    assert found.pace[0]["seconds"] == 1.0
    assert any(line.startswith("A step takes 1 s (median of 19): 90 % waiting for the devices") for line in found.words)
    assert any("1.0 % starting the step" in line and "1.0 % in Python between steps." in line for line in found.words)
    assert found.words[-1].startswith("Goodput ")


def test_the_first_failure_is_named(tmp_path):
    lost = event(1028.2, "failed", error="JaxRuntimeError: closed by peer", at=[], lost_peer=True, step=20)
    own = event(1028.6, "failed", error="KeyError: 'x'", at=["a.py:3 in f", "b.py:5 in g"], step=20)
    found = asked(tmp_path, [*loop(0), lost], [*loop(1), own])
    assert (found.state, found.began) == ("failed", 1)
    assert found.words[0].startswith("Process 1 failed first, after step 20, at ")
    assert found.words[0].endswith(": KeyError: 'x'") and found.words[1] == "It was raised in b.py:5 in g."


def test_who_was_killed_is_who_fell_silent_first(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-00001.log").write_text("step 19\n\nOut of memory\n")
    waits = [event(1033.0, "alive", doing="waiting for the devices", step=20)]
    found = asked(tmp_path, [*loop(0), *waits], [*loop(1, steps=19), event(1027.5, "begin", doing="save", step=19)])
    assert (found.state, found.began) == ("killed", 1)
    assert found.words[0].startswith("Process 1 ended without a message after step 19, while saving;")
    assert "SIGKILL" in found.words[1]
    assert found.words[2] == "The last lines of logs/rank-00001.log:\n    step 19\n    Out of memory"


def ended(time, rank, **values):
    words = f"process {rank} of 2 ended with signal 11 (SIGSEGV)"
    return event(time, "ended", rank=rank, pid=1, host=f"host{rank}", words=words, **values)


def test_the_supervisor_knows_who_ended_first(tmp_path):
    """Process 1 fell silent later than process 0, which aborted because it lost process 1."""
    ends = [ended(1030.0, 0, lost_peer=True), ended(1031.0, 1, lost_peer=False)]
    found = asked(tmp_path, loop(0, steps=18), loop(1), supervisor=ends)
    assert (found.state, found.began) == ("killed", 1)
    assert found.words[1] == "jdp launch: process 1 of 2 ended with signal 11 (SIGSEGV)."


def test_ends_of_other_visits_do_not_count(tmp_path):
    """A container that starts again has the same name and the same process numbers."""
    ends = [ended(1010.0, 1, lost_peer=False), ended(2031.0, 1, lost_peer=False)]
    logs = ([*loop(rank, steps=19 + rank), *loop(rank, began=2000.0)] for rank in (0, 1))
    found = asked(tmp_path, *logs, supervisor=ends)
    assert found.began == 1 and found.goodput.visits == 2
    earlier = [line for line in found.words if line.startswith("The visit that began ")]
    assert len(earlier) == 1 and ": Process 0 ended without a message after step 19" in earlier[0]


def test_a_deadline_has_its_own_words(tmp_path):
    words = "After step 20, waiting for the devices did not end in 300 seconds. Process 1 does not answer."
    stack = ["jax/_src/array.py:623 in _value", "<frozen runpy>:1 in x", "jdp/run/loop.py:283 in log"]
    passed = event(1400.0, "deadline", doing="…", step=20, words=words, behind=[1], stack=stack)
    found = asked(tmp_path, [*loop(0), passed], loop(1))
    assert (found.state, found.began) == ("deadline", 1)
    assert found.words[0] == f"It hung: {words}"
    assert found.words[1] == "Process 0 was in jax/_src/array.py:623 in _value, called from jdp/run/loop.py:283 in log."


def test_who_got_the_signal(tmp_path):
    left = event(1030.0, "stopped", code=75, step=20)
    saved = [event(1029.0, "end", doing="wait", step=20, seconds=0.5), left]
    found = asked(tmp_path, [*loop(0), *saved], [*loop(1), event(1028.5, "signal", signal="SIGUSR1"), *saved])
    assert (found.state, found.began) == ("stopped", 1)
    words = "It was stopped by SIGUSR1, which process 1 got first, after step 20, and saved. Run again: it resumes."
    assert found.words[0] == words


def test_it_goes_on(tmp_path):
    found = asked(tmp_path, loop(0), loop(1), alive=(0, 1), now=1030.0)
    assert (found.state, found.began) == ("running", None)
    assert found.words[0] == "It runs: step 20, training, 2 s after its last event."


@pytest.mark.parametrize("other", ["late", "silent"])
def test_it_hangs_and_who_is_behind(tmp_path, other):
    alive = [event(1000.0 + second, "alive", doing="waiting for the devices", step=20) for second in range(33, 400, 5)]
    late = [event(1000.0 + second, "alive", doing="waiting for data", step=19) for second in range(33, 400, 5)]
    second = [*loop(1, steps=19), *(late if other == "late" else [])]
    found = asked(tmp_path, [*loop(0), *alive], second, alive=(0, 1), now=1400.0)
    assert (found.state, found.began) == ("hung", 1)
    if other == "late":
        assert found.words[0] == (
            "It has hung for 6 minutes: Process 1 is at step 19 (waiting for data); process 0 is at step 20 "
            "(waiting for the devices)."
        )
    else:
        assert "Process 1 does not answer: 373 seconds ago it was at step 19, training." in found.words[0]


SLOW = {
    "data": (
        {"data": 0.61, "wait": 0.3},
        "Process 1 waits for data 61 % of its time: reading or decoding is too slow",
        "input: the devices wait up to 61 % of a step for batches, most in process 1",
    ),
    "python": (
        {"host": 0.5, "wait": 0.4},
        "Process 1 spends 50 % of its time in Python between steps: log, evaluate or save more rarely",
        "python: the devices wait up to 50 % of a step for Python between steps, most in process 1",
    ),
    "straggler": (
        {"dispatch": 0.2, "wait": 0.7},
        "Process 1 holds the others up: before its devices can begin it works",
        "process 1: the others wait 18 % of a step for its host",
    ),
}


@pytest.mark.parametrize(("parts", "words", "slow"), SLOW.values(), ids=SLOW)
def test_what_makes_it_slow(tmp_path, parts, words, slow):
    found = asked(tmp_path, loop(0), loop(1, **parts), alive=(0, 1), now=1030.0)
    assert any(line.startswith(words) for line in found.words), found.words
    assert found.slow == slow


def between(doing, seconds):
    return [
        event(1008.0, "resumed", step=0),
        *(event(1009.0 + i, "step", step=i, seconds=1.0, wait=0.9) for i in range(10)),
        event(1020.0 + seconds, "end", doing=doing, step=10, seconds=seconds),
    ]


COSTS = {
    "saves": (between("save", 5.0), "saving: the loop waits 20 % of the time for checkpoints"),
    "evaluations": (between("eval", 30.0), "evaluations: they take 60 % of the time"),
    "a short run": (between("wait", 0.0), "starting: with compiling it takes 45 % of the time"),
    "restarts": (
        [*between("wait", 0.0), *loop(0, of=1, began=1100.0, steps=4)],
        "restarts: they take 88 % of the time, with steps done again",
    ),
    "nothing": (loop(0, of=1, steps=100), None),
}


@pytest.mark.parametrize(("events", "slow"), COSTS.values(), ids=COSTS)
def test_what_costs_a_run_most_besides_its_steps(tmp_path, events, slow):
    begun = event(1001.0, "start", rank=0, of=1, pid=1, host="host0", began=1000.0)
    assert asked(tmp_path, [begun, *events]).slow == slow


def test_long_steps_are_counted(tmp_path):
    events = loop(0, of=1)
    events[-3] |= {"seconds": 9.0, "data": 8.0}
    found = asked(tmp_path, events, alive=(0,), now=1030.0)
    longest = "the longest, step 18, took 9 s, most of it waiting for data."
    assert f"1 of these steps took more than 3 times as long; {longest}" in found.words


def test_earlier_visits_do_not_judge_a_process(tmp_path):
    left = event(1029.0, "finished", step=20)
    lost = event(2010.0, "failed", error="closed by peer", at=[], lost_peer=True, step=0)
    found = asked(tmp_path, [*loop(0), left, *loop(0, began=2000.0, steps=0), lost], [*loop(1), left])
    assert (found.state, found.began) == ("failed", None)
    assert any(line.endswith(" finished after step 20.") for line in found.words)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "experiment.toml").write_text('name = "tiny"\n')
    return tmp_path / "runs" / "tiny"


def test_the_first_line_names_the_cause(run, capsys):
    """Of a run by its name; a failure leads to the page of errors."""
    asked(run, [*loop(0, of=1, data=0.61, wait=0.3), event(1029.0, "finished", step=20)])
    assert main(["why", "tiny", "--run-dir", str(run.parent)]) == 0
    first = f"{run}: finished; input: the devices wait up to 61 % of a step for batches\nIt finished after step 20.\n"
    said = capsys.readouterr().out
    assert said.startswith(first) and "errors.md" not in said
    assert main(["why", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["began"], found["goodput"]["visits"]) == ("finished", None, 1)
    assert found["words"][0] == "It finished after step 20."
    with (run / "events" / "rank-00000.jsonl").open("a") as file:
        file.write(json.dumps(event(1030.0, "failed", error="KeyError: 'x'", step=20)) + "\n")
    assert main(["why", str(run)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{run}: failed\nIt failed, after step 20, at ")
    page = Path(said.splitlines()[-1].rpartition(": ")[2])
    assert page.read_text(encoding="utf-8").startswith("# Errors by their text")


def test_a_run_that_failed_before_it_began(run, capsys):
    """Its first visit has removed all files but those of the launcher; a log of a process may be empty."""
    (run / "experiment.toml").unlink()
    (run / "logs").mkdir()
    (run / "logs" / "rank-00001.log").write_text("MemoryError\n")
    assert asked(run, [], supervisor=[ended(1000.0, 1, lost_peer=False)]).state == "unknown"
    assert main(["why", "tiny", "--run-dir", str(run.parent)]) == 0
    out = capsys.readouterr().out
    assert "has no log of a process" in out and "\njdp launch: process 1 of 2 ended with signal 11 (SIGSEGV).\n" in out
    assert out.endswith("\n    MemoryError\n")
    assert "it has no experiment.toml" in refused(capsys, "report", run)


@pytest.mark.parametrize("given", ["tinny", "nothing/at/all", "~nosuchuser/run", "a\0b"])
def test_no_run_is_one_clear_error(run, capsys, given):
    error = refused(capsys, "why", given, "--run-dir", run.parent)
    assert error.count("\n") == 1
    assert given != "tinny" or "did you mean" in error
