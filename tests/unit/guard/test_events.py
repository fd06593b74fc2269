"""The log of events is bounded, complete after any end, and cheap; the account of a run's time counts all of it."""

import json
import time
from dataclasses import asdict

import pytest

from jdp.guard.deadline import Deadline
from jdp.guard.time_account import account
from jdp.guard.watch import Watch
from jdp.launch.events import EventLog, history, read, read_logs


def test_grown_logs_keep_the_account(tmp_path):
    file, kept = tmp_path / "events" / "rank-00003.jsonl", lambda events: asdict(account(events))
    log = EventLog(file, account=kept, limit_bytes=2000)
    log.event("start", rank=3, of=4)
    log.event("started", step=0, devices=8)
    for step in range(1, 101):
        log.event("step", step=step, seconds=0.5, data=0.1)
    log.close()
    files = sorted(path.name for path in (tmp_path / "events").iterdir())
    assert files == ["rank-00003.jsonl", "rank-00003.old.jsonl"]
    assert all(path.stat().st_size < 2500 for path in (tmp_path / "events").iterdir())
    spent = account(read(log.file))
    assert (spent.visits, spent.step_count) == (1, 99)
    assert [(event["event"], event["devices"]) for event in history(read(log.file))] == [("started", 8)]
    assert spent.steps == pytest.approx(99 * 0.4) and spent.data == pytest.approx(10.0)
    steps = [event["step"] for event in read_logs(tmp_path / "events", "rank")[3] if event["event"] == "step"]
    assert steps == list(range(steps[0], 101)) and len(steps) > 10


def test_many_incidents_leave_the_visit_known(tmp_path):
    """A new file's first line keeps the visit's start beside the newest incidents."""
    log = EventLog(tmp_path / "rank-00000.jsonl", limit_bytes=40_000)
    log.event("start", rank=0, of=1)
    log.event("started", step=0, devices=8)
    for step in range(1, 801):
        log.event("bad step", step=step, words="The loss is not finite.")
    log.close()
    started, *incidents = history(read(log.file))
    assert (started["event"], started["devices"]) == ("started", 8)
    assert incidents[-1]["step"] == 800 and len(incidents) >= 400


def test_half_written_lines_are_left_out(tmp_path):
    (tmp_path / "rank-00000.jsonl").write_text('{"time": 1.0, "event": "start"}\n{"time": 2.0, "eve')
    log = EventLog(tmp_path / "rank-00000.jsonl")
    log.event("resumed", step=4)
    log.close()
    assert [event["event"] for event in read(log.file)] == ["start", "resumed"]


def test_hostile_files_are_not_believed(tmp_path):
    objects = ['{"event": "step"}', '{"time": true, "event": "step"}', '{"time": 1, "event": 3}']
    (tmp_path / "rank-00000.jsonl").write_text("\n".join(["[]", "null", *objects, "[" * 9999]))
    (tmp_path / "rank-x.jsonl").write_text('{"time": 1, "event": "start"}')
    before = {"time": 5.0, "event": "before", "steps": "many", "visits": 2, "first": 1.0, "nothing": 3}
    before["history"] = [3, {"event": "started"}, {"event": "finished", "step": 3}]
    (tmp_path / "rank-00001.jsonl").write_text(json.dumps(before))
    assert read_logs(tmp_path, "rank") == {0: [], 1: []}
    assert account(read(tmp_path / "rank-00001.jsonl")).steps == 0.0
    assert history(read(tmp_path / "rank-00001.jsonl")) == []
    assert account(read(tmp_path / "rank-00000.jsonl")).goodput is None
    assert read_logs(tmp_path / "nowhere", "rank") == {}


def test_an_unwritable_disk_stops_only_the_log(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jdp.base.notices._said", set())
    (tmp_path / "file").write_text("")
    log = EventLog(tmp_path / "file" / "rank-00000.jsonl")
    log.event("step", step=1)
    log.close()
    assert read(log.file) == []
    assert "events are lost until it can, the run goes on" in capsys.readouterr().err


def test_what_a_step_costs(tmp_path):
    """18 µs on a loaded core, below 0.02 % of a quickstart step, of 100 ms or more; held to 100 times that."""
    watch = Watch(EventLog(tmp_path / "rank-00000.jsonl"), deadline := Deadline())
    with deadline:
        watch.resumed(0)
        start = time.process_time()
        for step in range(1, 1001):
            for part in ("data", "dispatch", "wait"):
                watch.mark(part)
            watch.step(step)
        assert time.process_time() - start < 1.8
    first, second = [event for event in read(tmp_path / "rank-00000.jsonl") if event["event"] == "step"][:2]
    assert first["step"] == 1 and {"seconds", "data", "dispatch", "wait", "host"} <= second.keys()


def visit(began, resumed, steps, *, left=None):
    """A visit that starts for 10 seconds, of which it restores 4, and takes these steps: 5 seconds, then 1 each."""
    events = [
        {"time": began + 2, "event": "start", "began": began},
        {"time": began + 7, "event": "end", "doing": "restore", "seconds": 4.0},
        {"time": began + 10, "event": "resumed", "step": resumed},
    ]
    for i, step in enumerate(steps):
        step = {"event": "step", "step": step, "seconds": 1.0 if i else 5.0, "data": 0.25}
        events.append({"time": began + 15 + i, **step})
    return [*events, *([{"time": events[-1]["time"], "event": left}] if left else [])]


def test_a_calm_visit():
    spent = account([*visit(100.0, 0, range(1, 12)), {"time": 127.0, "event": "end", "doing": "eval", "seconds": 2.0}])
    assert spent.total == 27.0
    assert (spent.start, spent.restore, spent.compile, spent.eval) == (6.0, 4.0, 4.75, 2.0)
    assert (spent.steps, spent.data, spent.step_count) == (7.5, 2.75, 10)
    assert sum(spent.parts.values()) == pytest.approx(spent.total)
    assert spent.goodput == pytest.approx(9.5 / 27)
    assert spent.words().startswith("goodput 35 % of 27 s; starting 22 %, compiling 18 %, making or restoring")


def test_lost_steps_are_not_useful_time():
    """Killed at step 11; the second visit resumes from 8 and is born 60 seconds later."""
    spent = account([*visit(100.0, 0, range(1, 12)), *visit(185.0, 8, range(9, 14), left="finished")])
    assert (spent.visits, spent.idle) == (2, 60.0)
    assert spent.lost == pytest.approx(3 * 0.75)
    assert spent.step_count == 10 - 3 + 4
    assert spent.steps == pytest.approx(spent.step_count * 0.75)
    assert sum(spent.parts.values()) == pytest.approx(spent.total)


def test_visits_with_nothing_to_do_are_left_out():
    calm = visit(100.0, 0, range(1, 12), left="finished")
    looked = [
        {"time": 9000.0, "event": "start", "began": 8990.0},
        {"time": 9005.0, "event": "end", "doing": "restore", "seconds": 4.0},
        {"time": 9006.0, "event": "nothing to do"},
    ]
    assert account([*calm, *looked]) == account(calm)


def test_following_files_continue_the_account():
    events = [*visit(100.0, 0, range(1, 12)), *visit(185.0, 8, range(9, 14), left="finished")]
    for cut in range(1, len(events)):
        before = {"time": 0.0, "event": "before", **asdict(account(events[:cut]))}
        whole, joined = account(events), account([before, *events[cut:]])
        assert asdict(joined) == pytest.approx(asdict(whole)), cut
