"""The fits, the claim's arithmetic, what is recorded of H100s, and that more devices share the work of a batch."""

import itertools

import jax
import pytest
from load import load

from jdp.foresight.program.collectives import collectives, traffic

lesson, planned = load("scaling"), load("planned")


def test_amdahl_and_gustafson_recover_the_fractions():
    counts = [1, 2, 4, 8]
    assert lesson.amdahl(counts, [0.3 + 0.7 / n for n in counts]) == (pytest.approx(0.3), pytest.approx(0.7))
    assert lesson.gustafson(counts, [n - 0.2 * (n - 1) for n in counts]) == pytest.approx(0.2)


def test_the_claim_about_175b_does_not_add_up():
    found = lesson.claimed_175b()
    assert found["64 at 95 %"] == pytest.approx(60.8)
    assert found["by its own numbers"] / 64 == pytest.approx(0.9963, abs=1e-4), "0.3 s exposed of 82 s are 0.4 %"
    assert found["tokens per batch"] == 128e6


@pytest.mark.parametrize("devices", [1, 4])
def test_every_device_sends_the_whole_gradient(devices: int):
    step, state, batch = lesson.prepared(jax.devices()[:devices], 8 // devices, width=16)
    assert batch["x"].shape == (8, 16)
    sent = traffic(collectives(step.compile(state, batch).as_text()))
    gradient = 4 * 4 * 16 * 16
    assert not sent if devices == 1 else gradient <= sent["all-reduce"] <= gradient + 16, "the loss is sent too"


QUICK = {(planned.FEW, planned.HOSTS[0]), *((way, planned.HOSTS[-1]) for way in planned.WAYS)}
CELLS = [
    pytest.param(way, hosts, id=f"{row}-{hosts}", marks=[] if (way, hosts) in QUICK else pytest.mark.slow)
    for (row, way), hosts in itertools.product(enumerate(planned.WAYS), planned.HOSTS)
]


@pytest.mark.aot
@pytest.mark.parametrize(("way", "hosts"), CELLS)
@pytest.mark.default_ids()
def test_what_is_recorded_is_what_is_planned(way: str, hosts: int):
    """Four digits are recorded; 1 % leaves room for another XLA's choice of kernels, not for another schedule."""
    recorded = planned.RECORDED[way][planned.HOSTS.index(hosts)]
    assert planned.foreseen(way, hosts) == pytest.approx(recorded, rel=0.01)


def test_what_is_said_of_the_recorded_numbers_holds(capsys):
    """The sentences have the table's numbers; these are the comparisons that they make in words."""
    end = {way: rows[-1][0] for way, rows in planned.RECORDED.items()}
    assert end[planned.FEW] < end[planned.LARGE] < end[planned.MANY]
    few, replicas = planned.RECORDED[planned.FEW], planned.RECORDED[planned.REPLICAS]
    assert replicas[0] == few[0], "on one host a replica of each host is the whole mesh"
    assert all(replicas[i][0] < few[i][0] for i in (1, 2, 3))
    assert planned.RECORDED[planned.LARGE][0][0] < planned.RECORDED[planned.MANY][0][0]
    planned.show_planned(planned.RECORDED, lesson.chart()[1][0])
    said = " ".join(capsys.readouterr().out.split())
    assert "512 GPUs are 90% efficient, at 2k 67%" in said
    assert "takes 4.0 GiB on each of 8 GPUs and 1.2 on each of 64" in said
