"""The README's table of benchmarks is the one that its command makes, and no benchmark is left out of it."""

import importlib.util
import json
import subprocess
import sys

import pytest
from paths import EXPERIMENTS

BENCHMARKS = EXPERIMENTS / "benchmarks"


@pytest.fixture(scope="module")
def every():
    """`experiments/benchmarks/all.py` as a module."""
    spec = importlib.util.spec_from_file_location("every_benchmark", BENCHMARKS / "all.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_has_the_measured_table(every):
    readme = every.README.read_text()
    made = every.table(json.loads(every.RESULTS.read_text()))
    assert every.with_table(readme, made) == readme, "python experiments/benchmarks/all.py --readme"


def test_every_benchmark_is_run(every):
    programs = {file.stem for file in BENCHMARKS.glob("*.py") if "finish(" in file.read_text()} - {"measure"}
    assert {words[0] for words in every.RUNS} == programs
    assert len(set(every.RUNS)) == len(every.RUNS), "no run twice"


@pytest.mark.rest
@pytest.mark.parametrize("name", sorted(file.stem for file in BENCHMARKS.glob("*.py") if "finish(" in file.read_text()))
def test_a_benchmark_starts(name):
    """Its models and targets are made when it is imported; one that fails there measures nothing."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *(["--help"] if name != "measure" else [])]
    subprocess.run(command, check=True, capture_output=True, cwd=BENCHMARKS.parents[1])


def test_a_new_result_replaces_the_old(every, tmp_path, monkeypatch):
    monkeypatch.setattr(every, "RESULTS", tmp_path / "results.json")

    def entry(name, result, **machine):
        machine = {"cores": 2, "load": 0.5, "jax": "0.10.2", **machine}
        words = next(list(words) for words in every.RUNS if words[0] == name)
        row = {"measures": "seconds", "result": result, "promised": "–", "machine": machine, "date": "2026-01-01"}
        return {"run": words, **row}

    of_before = {**entry("step_time", "0"), "run": ["dispatch", "--an-option-it-had"]}
    every.RESULTS.write_text(json.dumps([of_before]))
    for name, result, machine in (("peers", "2", {}), ("step_time", "1", {}), ("peers", "3", {"gpu": "H100"})):
        every.keep(entry(name, result, **machine))
    every.keep(entry("peers", "4"))
    kept = json.loads(every.RESULTS.read_text())
    assert [(one["run"][0], one["result"]) for one in kept] == [("step_time", "1"), ("peers", "4"), ("peers", "3")]
    assert every.table(kept).splitlines()[-1].startswith("| `peers.py` | seconds | 3 | – | H100, jax")
