"""What `jdp plan` says of the hosts' memory, into which a run copies its state."""

import json

from tiny_experiment import points_text, tables, write_points

from jdp.cli.main import main

TABLES = tables(
    optimizer={"name": "adamw", "lr": 0.01}, train={"steps": 4, "batch_size": 16}, guard={"keep_in_memory": 5}
)


def planned(capsys, file, *more):
    capsys.readouterr()
    assert main(["plan", str(file), "--target", "cpu:8", "--strategy", "ddp,zero1", *more]) == 0
    return capsys.readouterr().out


def test_two_copies_and_a_save_must_fit(tmp_path, capsys):
    write_points(tmp_path, points_text(TABLES, hidden=512))
    file = tmp_path / "points.toml"
    report = json.loads(planned(capsys, file, "--json", "--host-memory", "0.0001"))
    state = 3 * 4 * 5123 + 4 * 6  # weights and two moments; four counters and a key of two words
    for each in report["strategies"]:
        host = each["host"]
        assert (host["copies"], host["staging"], host["available"]) == (2 * state, state, round(0.0001 * 2**30))
        assert not host["fits"] and each["fits"] is False
    assert report["choice"] is None
    text = planned(capsys, file, "--host-memory", "4")
    assert text.count("a host's memory holds") == 1, "all strategies keep the same"
    assert " host" in next(line for line in text.splitlines() if line.startswith("candidate"))
