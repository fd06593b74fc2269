"""The README tells the truth: its loop runs before and after the change, and its commands print what it shows."""

import re
import runpy
import subprocess
import sys
import tomllib

import jax
import numpy as np
import pytest
from own_process import python
from paths import ROOT
from test_guides import VIRTUAL, blocks

import jdp
from jdp.cli import plan
from jdp.cli.main import COMMANDS, main
from jdp.experiment.file import load

README = (ROOT / "README.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^\$ (jdp .*)\n((?:.*\n)*?)```", README, flags=re.M)
(SNIPPET,) = (block.text for block in blocks(README) if block.language == "python")
(DIFF,) = (block.text for block in blocks(README) if block.language == "diff")


def test_it_is_one_screen():
    assert len(README.split()) <= 1000 and SNIPPET.count("\n") <= 30


@pytest.fixture(scope="module")
def before():
    """What the snippet and the loop before the change define; both learn ten classes of one row each, from 2.3."""
    names = {}
    exec(SNIPPET.replace(VIRTUAL, "assert jax.device_count() == 8"), names)  # here they have started
    assert 0 < float(names["metrics"]["loss"]) < 0.5
    names |= {"loader": lambda make=names["loader"]: make(np.random.default_rng(1))}
    exec("\n".join(line[1:] for line in DIFF.splitlines() if line[:1] != "+"), names)
    assert 0 < float(names["loss"]) < 0.5
    return names


@pytest.mark.parametrize("word", ["ddp", "zero1", "zero2", "zero3"])
def test_the_changed_loop_has_the_loops_loss(word, before):
    """To rounding."""
    assert DIFF.count('"zero3"') == SNIPPET.count('"zero3"') == 1
    after = {**before}
    exec("\n".join(line[1:] for line in DIFF.replace("zero3", word).splitlines() if line[:1] != "-"), after)
    assert float(after["metrics"]["loss"]) == pytest.approx(float(before["loss"]), rel=1e-5)
    assert str(after["plan"].strategy) == word


@pytest.fixture(scope="module")
def planned_once():
    """In this process `jdp plan` compiles the candidates once, for tables and for JSON."""
    compiled, kept = plan._compiled, {}

    def once(options, overrides, targets):
        if (given := (options.file, *targets)) not in kept:
            kept[given] = compiled(options, overrides, targets)
        return kept[given]

    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(ROOT)
        patched.setattr(plan, "_compiled", once)
        yield


@pytest.mark.rest
@pytest.mark.aot
@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command.split()[1] for command, _ in SHOWN])
def test_commands_print_what_is_shown(command, shown, planned_once, capsys):
    """Some of their lines, as they stand; rounding, which differs between processors, without its numbers."""
    _, name, *words = command.split()
    if name == "plan":
        code, printed = main([name, *words]), capsys.readouterr()
    else:
        done = python("-m", "jdp", name, *words, cwd=ROOT, timeout=3600)
        code, printed = done.returncode, (done.stdout, done.stderr)
    assert code == 0, printed
    real = printed[0].splitlines()
    for line in shown.splitlines():
        assert line in real or ("difference" in line and form(line) in map(form, real))


@pytest.mark.rest
def test_training_prints_what_is_shown(tmp_path, monkeypatch, capsys):
    """Its first two commands; the numbers are of a whole run, of which this is the form."""
    block = next(block.text for block in blocks(README) if block.text.startswith("step"))
    small = "--train.steps 2 --train.log_every 1 --train.batch_size 8 --train.eval_batches 1 --model.layers 1"
    command = f"train {ROOT}/experiments/quickstart.toml --run-dir {tmp_path} --devices none {small}"
    assert main([*command.split(), "--optimizer.warmup_steps", "1", "--model.width", "16", "--model.heads", "2"]) == 0
    printed = {form(line) for line in capsys.readouterr().out.splitlines()}
    shown = block.replace("runs/quickstart", str(tmp_path / "quickstart")).splitlines()
    assert {form(line) for line in (*shown[:3], *shown[-3:])} <= printed


def form(line):
    """The line's words without its numbers."""
    return tuple(re.findall(r"[a-z_]+", re.sub(r"\d[\d.e+/-]*k?", " ", line)))


def test_its_picture_says_what_it_shows():
    ((described, file),) = re.findall(r"!\[(.*?)\]\((.*?\.svg)\)", README)
    drawn = (ROOT / file).read_text(encoding="utf-8")
    assert described == re.search("<title>(.*?)</title>", drawn)[1]
    assert "prefers-color-scheme: dark" in drawn
    assert all("fill: var(--" in text for text in re.findall("<text .*?>", drawn))


@pytest.mark.rest
@pytest.mark.aot
def test_its_picture_is_made_again(tmp_path, planned_once, monkeypatch, capsys):
    """By its program, from the compiled steps; labels are text, apart from one another."""

    def run(words, **_):
        return subprocess.CompletedProcess(words, main(words[3:]), capsys.readouterr().out)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["pictures.py", str(tmp_path)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path("experiments/pictures.py", run_name="__main__")
    drawn = (tmp_path / "memory.svg").read_text(encoding="utf-8")
    assert drawn == (ROOT / ".github" / "pictures" / "memory.svg").read_text(encoding="utf-8")
    assert "mathdefault" not in drawn


def test_commands_files_and_extras_exist():
    assert {command.split()[1] for command, _ in SHOWN} == {"plan", "verify", "prove"}
    assert set(re.findall(r"\bjdp (\w+) (?:experiments|runs)/", README)) <= COMMANDS.keys()
    for file in re.findall(r"experiments/\w+\.toml", README):
        load(ROOT / file)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\.\[(\w+)\]", README)) <= extras.keys()
    assert set(re.findall(r"`jdp\.(\w+)", README)) <= {*jdp.__all__}
    assert re.search(r"^pip install.*\[test\].*pytest", README, re.MULTILINE), "a line of its own, which .ci/run calls"
    assert jax.device_count() == 8
