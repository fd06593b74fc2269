"""`jdp plan --table`, ZeRO's closed form for a size; and `--host-memory`, into which a run copies its state."""

import json

import pytest
from tiny_experiment import points_text, tables, write_points
from tiny_runs import refused

from jdp.cli.main import main


def test_70b_on_8_devices(capfd):
    assert main(["plan", "--table", "70e9:8", "--accumulate", "4", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["parameters"], found["devices"], found["accumulate"]) == (70_000_000_000, 8, 4)
    gb = {name: (row["total"] / 1e9, row["sent"] / 1e9) for name, row in found["paper"].items()}
    # 2 + 2 + 12 bytes; sent: gradients and weights of 2 bytes, each once or for each microbatch, times 7/8.
    assert gb == {"ddp": (1120, 245), "zero1": (385, 245), "zero2": (262.5, 612.5), "zero3": (140, 1470)}
    ours = found["jdp"]["zero2"]
    assert [ours[each] / 1e9 for each in ("master", "moments", "gradients", "working")] == [35, 70, 35, 140]


def test_people_get_both_tables(capfd):
    assert main(["plan", "--table", "70e9:8", "--strategy", "ddp,zero2"]) == 0
    text = capfd.readouterr().out
    assert "70,000,000,000 parameters on 8 devices" in text
    assert ["zero2", "140.0", "17.5", "105.0", "262.5", "245.0"] in [line.split() for line in text.splitlines()]
    assert "their totals: ddp 840.0, zero2 227.5 GB" in text
    assert "zero3 " not in text.replace("of which zero3 has", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["plan"], "jdp plan needs an experiment; given no FILE"),
        *(
            (["plan", "--table", size], "takes PARAMETERS:DEVICES, whole")
            for size in ("70e9", "0.5:8", "8:0", "1e99:8")
        ),
        (["plan", "x.toml", "--table", "7e9:8"], "given FILE too: remove it"),
        (["plan", "--table", "7e9:8", "--target", "cpu:8"], "given --target too: remove it"),
        (["plan", "--table", "7e9:8", "--model.layers", "3"], "given --model.layers too: remove it"),
        (["plan", "--table", "7e9:8", "--accumulate", "1,4"], "--table takes one --accumulate; given 1,4"),
        (["plan", "--table", "7e9:8", "--strategy", "zero4"], "did you mean"),
    ],
)
def test_what_the_table_does_not_use_is_refused(arguments, expected, capfd):
    assert expected in refused(capfd, *arguments)


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
