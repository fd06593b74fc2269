"""Wherever a path enters, an address is refused in words, and never makes a folder `gs:` or `s3:`."""

from pathlib import Path

import jax
import pytest
from tiny_experiment import points_text, write_points

import jdp
from jdp.cli.main import main
from jdp.export import export_safetensors, gpt_config_from_hf, import_safetensors

WORDS = r"must be on a disk of this machine, given .*(gs|s3):.*: mount it .*outside\.md.*train\.mirror"
COMMANDS = {
    "runs": ["train", "FILE", "--run-dir", "s3://bucket/runs"],
    "data": ["train", "FILE", "--data.source", "gs://bucket/points.npz"],
    "an experiment": ["train", "s3://bucket/points.toml"],
    "a plan's page": ["plan", "FILE", "--target", "cpu:2", "--html", "gs://bucket/plan.html"],
    "a target": ["plan", "FILE", "--target", "s3://bucket/mine.toml:1x8"],
    "a report": ["report", "runs/points", "-o", "s3://bucket/report.html"],
    "logs": ["launch", "-n", "2", "--log-dir", "s3://bucket/logs", "--", "FILE"],
    "a doctor's folder": ["doctor", "--run-dir", "s3://bucket/runs"],
}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write_points(tmp_path, points_text("[train]\nsteps = 1\nbatch_size = 8\n"))
    before = sorted(tmp_path.iterdir())
    yield file
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("what", COMMANDS)
def test_a_command_refuses_it(file, capsys, what):
    arguments = [str(file) if word == "FILE" else word for word in COMMANDS[what]]
    try:
        code = main(arguments)
    except SystemExit as exiting:
        code = exiting.code
    error = " ".join(capsys.readouterr().err.split())
    assert code == 2 and "Traceback" not in error and ("s3:" in error or "gs:" in error), (code, error)


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("address", ["gs://bucket/x", "s3://bucket/x"])
def test_a_function_for_disks_refuses_it(file, address, kind):
    for use in (jdp.save, jdp.restore, export_safetensors, import_safetensors):
        with pytest.raises(ValueError, match=WORDS):
            use(kind(address), {"w": jax.numpy.ones(2)})
    for use in (jdp.Checkpoints, gpt_config_from_hf, jdp.keep_programs):
        with pytest.raises(ValueError, match=WORDS):
            use(kind(address))


def test_the_cache_is_on_a_disk(file, monkeypatch):
    monkeypatch.setenv("JDP_CACHE_DIR", "s3://bucket/cache")
    with pytest.raises(ValueError, match=WORDS):
        jdp.keep_programs()
