"""The fits, the claim's arithmetic, and that more devices share the work of the same batch."""

import jax
import pytest
from load import load
from tiny_experiment import points_text, write_points

from jdp.foresight.program.collectives import collectives, traffic

lesson = load("scaling")


def test_amdahl_and_gustafson_find_what_the_numbers_were_made_of():
    counts = [1, 2, 4, 8]
    assert lesson.amdahl(counts, [0.3 + 0.7 / n for n in counts]) == (pytest.approx(0.3), pytest.approx(0.7))
    assert lesson.gustafson(counts, [n - 0.2 * (n - 1) for n in counts]) == pytest.approx(0.2)


def test_the_claim_about_175b_does_not_add_up():
    found = lesson.claimed_175b()
    assert found["64 at 95 %"] == pytest.approx(60.8)
    assert found["by its own numbers"] / 64 == pytest.approx(0.9963, abs=1e-4), "0.3 s exposed of 82 s are 0.4 %"
    assert found["tokens a batch"] == 128e6


@pytest.mark.parametrize("devices", [1, 4])
def test_every_device_sends_the_whole_gradient_however_many_share_the_rows(devices, monkeypatch):
    monkeypatch.setattr(lesson, "WIDTH", 16)
    step, state, batch = lesson.prepared(jax.devices()[:devices], 8 // devices)
    assert batch["x"].shape == (8, 16)
    sent = traffic(collectives(step.compile(state, batch).as_text()))
    gradient = 4 * 4 * 16 * 16
    assert not sent if devices == 1 else gradient <= sent["all-reduce"] <= gradient + 16, "the loss is sent too"


@pytest.mark.aot
def test_fewer_sequences_a_gpu_scale_worse_and_hold_less(tmp_path, monkeypatch):
    text = points_text('[optimizer]\nname = "sgd"\nlr = 0.1\n[train]\nsteps = 1\nbatch_size = 8\n', hidden=256)
    write_points(tmp_path, text)
    monkeypatch.setattr(lesson, "FILES", tmp_path)
    monkeypatch.setattr(lesson, "MODELS", {("points", 1): "ddp", ("points", 64): "ddp"})
    few, many = lesson.foreseen("points", 1, 1), lesson.foreseen("points", 64, 1)
    assert 0 < few[0] < many[0] < 1 and few[1] < many[1] and few[2] < many[2]
