"""What `pip install 'jdp[EXTRA]'` brings: bounds that the installed packages keep, and every extra that jdp names."""

import re
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
TESTED = ("aot", "chat", "docs", "gcs", "hf", "mpi", "s3", "wandb")
"""Extras whose packages the tests run on: those of `test`."""


@pytest.mark.parametrize("extra", TESTED)
def test_extras_have_tested_bounds(extra):
    for requirement in map(Requirement, EXTRAS[extra]):
        if requirement.name == "jax" or (requirement.marker and not requirement.marker.evaluate()):
            continue
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators == {">=", "<"}, f"{requirement} needs a lower and an upper bound"
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            pytest.skip(f"could not import {requirement.name!r}")
        assert requirement.specifier.contains(version), f"{requirement}, {version} is installed"


def test_the_extra_of_the_tests_has_them():
    own = next(requirement for requirement in map(Requirement, EXTRAS["test"]) if requirement.name == "jdp")
    assert own.extras == {*TESTED}


def test_named_extras_exist_and_are_explained():
    texts = [path.read_text() for path in (ROOT / "jdp").rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"jdp\[([a-z0-9]+)\]|pip install '\.\[([a-z0-9]+)\]'", text)}
    assert {one or other for one, other in named} <= EXTRAS.keys()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", (ROOT / "jdp" / "README.md").read_text(), re.M)
    assert {extra for row in rows for extra in re.findall(r"\w+", row)} >= EXTRAS.keys(), "jdp/README.md"


def test_no_module_imports_kubernetes_or_mpi():
    for path in (ROOT / "jdp").rglob("*.py"):
        assert not re.search(r"^\s*(?:import|from) (?:kubernetes|mpi4py)\b", path.read_text(), re.M), path
