"""The flight recorder: bounded, whole after any end, and cheap."""

import json
import time

import pytest

from jdp.guard.deadline import Deadline
from jdp.guard.flight_recorder import Flight, history, read, read_ranks
from jdp.guard.time_account import account
from jdp.guard.watch import Watch


def test_a_file_is_set_aside_when_it_has_grown_and_nothing_of_the_account_is_lost(tmp_path):
    flight = Flight(tmp_path / "flight", 3, limit_bytes=2000)
    flight.event("start", rank=3, of=4)
    flight.event("started", step=0, devices=8)
    for step in range(1, 101):
        flight.event("step", step=step, seconds=0.5, data=0.1)
    flight.close()
    files = sorted(path.name for path in (tmp_path / "flight").iterdir())
    assert files == ["rank-00003.jsonl", "rank-00003.old.jsonl"]
    assert all(path.stat().st_size < 2500 for path in (tmp_path / "flight").iterdir())
    spent = account(read(flight.file))
    assert (spent.visits, spent.step_count) == (1, 99)
    assert [(event["event"], event["devices"]) for event in history(read(flight.file))] == [("started", 8)]
    assert spent.steps == pytest.approx(99 * 0.4) and spent.data == pytest.approx(10.0)
    kept = [event["step"] for event in read_ranks(tmp_path / "flight")[3] if event["event"] == "step"]
    assert kept == list(range(kept[0], 101)) and len(kept) > 10


def test_many_incidents_leave_the_visit_known(tmp_path):
    """A new file's first line keeps the visit's start beside the newest incidents."""
    flight = Flight(tmp_path, 0, limit_bytes=40_000)
    flight.event("start", rank=0, of=1)
    flight.event("started", step=0, devices=8)
    for step in range(1, 801):
        flight.event("bad step", step=step, words="The loss is not finite.")
    flight.close()
    started, *incidents = history(read(flight.file))
    assert (started["event"], started["devices"]) == ("started", 8)
    assert incidents[-1]["step"] == 800 and len(incidents) >= 400


def test_a_half_written_line_is_ended_and_left_out(tmp_path):
    (tmp_path / "rank-00000.jsonl").write_text('{"time": 1.0, "event": "start"}\n{"time": 2.0, "eve')
    flight = Flight(tmp_path, 0)
    flight.event("resumed", step=4)
    flight.close()
    assert [event["event"] for event in read(flight.file)] == ["start", "resumed"]


def test_hostile_files_are_not_believed(tmp_path):
    lines = [
        "[]",
        "null",
        '{"event": "step"}',
        '{"time": true, "event": "step"}',
        '{"time": 1, "event": 3}',
        "[" * 9999,
    ]
    (tmp_path / "rank-00000.jsonl").write_text("\n".join(lines))
    (tmp_path / "rank-x.jsonl").write_text('{"time": 1, "event": "start"}')
    before = {"time": 5.0, "event": "before", "steps": "many", "visits": 2, "first": 1.0, "nothing": 3}
    before["history"] = [3, {"event": "started"}, {"event": "finished", "step": 3}]
    (tmp_path / "rank-00001.jsonl").write_text(json.dumps(before))
    assert read_ranks(tmp_path) == {0: [], 1: []}
    assert account(read(tmp_path / "rank-00001.jsonl")).steps == 0.0
    assert history(read(tmp_path / "rank-00001.jsonl")) == []
    assert account(read(tmp_path / "rank-00000.jsonl")).goodput is None
    assert read_ranks(tmp_path / "nowhere") == {}


def test_a_disk_that_cannot_be_written_stops_the_recorder_only(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jdp.base.notices._said", set())
    (tmp_path / "file").write_text("")
    flight = Flight(tmp_path / "file", 0)
    flight.event("step", step=1)
    flight.close()
    assert "events are lost until it can, the run goes on" in capsys.readouterr().err


def test_what_a_step_costs(tmp_path):
    """18 µs on a loaded core, below 0.02 % of a quickstart step, of 100 ms or more; held to 100 times that."""
    with Watch(Flight(tmp_path, 0), Deadline()) as watch:
        watch.resumed(0)
        start = time.process_time()
        for step in range(1, 1001):
            for part in ("data", "dispatch", "wait"):
                watch.mark(part)
            watch.step(step)
        assert time.process_time() - start < 1.8
    first, second = [event for event in read(tmp_path / "rank-00000.jsonl") if event["event"] == "step"][:2]
    assert first["step"] == 1 and {"seconds", "data", "dispatch", "wait", "host"} <= second.keys()
