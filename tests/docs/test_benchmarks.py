"""The README's table of benchmarks is the one that its command makes, and no benchmark is left out of it."""

import importlib.util
import json

import pytest
from paths import EXPERIMENTS

BENCHMARKS = EXPERIMENTS / "benchmarks"
PROGRAMS = {file.stem for file in BENCHMARKS.glob("*.py") if "finish(" in file.read_text()}


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
    assert {words[0] for words in every.RUNS} == PROGRAMS - {"measure"}
    assert len(set(every.RUNS)) == len(every.RUNS), "no run twice"
