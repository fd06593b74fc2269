"""The markers `fast` and `aot`, put on tests as they are collected: no test file needs a line for them.

`fast`: what `FAST` lists, a part of every package that runs in a minute on two cores without compiling a step.
`aot`: what describes GPUs that this machine does not have (`target("h100:8x8")`). It needs XLA's GPU compiler, from
`pip install '.[aot]'`, and most of it compiles. A test is marked where its own text, or what it uses of its file, names
such a target; one that describes GPUs in another way fails until it bears `@pytest.mark.aot`.
"""

import ast
import functools
import re
from pathlib import Path

import pytest
from jax.experimental import topologies

TESTS = Path(__file__).parent

FAST = (
    "test_docstrings.py",
    "test_markers.py",
    "test_packages.py",
    "test_public.py",
    "core/test_bad_calls.py",
    "core/test_schedulers.py",
    "base/test_formatting.py",
    "core/test_mesh.py",
    "core/test_schedules.py",
    "models/test_sizes.py::test_named_models_have_the_published_sizes",
    "data/test_arrays.py",
    "data/test_mixtures.py",
    "data/test_order_properties.py",
    "data/test_packing.py",
    "data/test_token_ids.py",
    "data/test_tokenizers.py",
    "launch/test_launch.py",
    "guard/test_stragglers.py",
    "foresight/test_choice.py",
    "foresight/test_collective_texts.py",
    "foresight/test_zero_formula.py",
    "checkpoint/test_safetensors_files.py",
    "guard/test_diagnosis.py",
    "guard/test_goodput.py",
    "report/test_plan_page.py::test_hostile_names_stay_text",
    "report/test_pages.py::test_one_script_whose_digest_the_policy_names",
    "prove/test_prove.py::test_what_cannot_be_proven",
    "prove/test_prove.py::test_numbers_that_are_none_do_not_pass_for_equal",
    "experiment/test_experiment.py",
    "run/test_metrics.py",
    "cli/test_cli.py",
)
"""Files below `tests/`, or single tests of one. No one of them takes more than a few seconds."""

_GPU = re.compile(r"(a100|h100|h200|b200)(:|$)")
_DESCRIBES = re.compile(r"\btarget\(|\bverify\(|\bforesee\(|\babstract_on\(|--target")
_unmarked: str | None = None


def is_fast(path: Path, function: str) -> bool:
    name = path.relative_to(TESTS).as_posix()
    return name in FAST or f"{name}::{function}" in FAST


@functools.cache
def describing(path: Path) -> frozenset[str]:
    """Return the names of the functions of a file that describe GPUs, directly or by what they use of the file."""
    text = path.read_text(encoding="utf-8")
    return names_describing(text) if _DESCRIBES.search(text) else frozenset()


def names_describing(text: str) -> frozenset[str]:
    definitions: dict[str, ast.AST] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign):
            definitions |= {each.id: node for each in ast.walk(node) if isinstance(each, ast.Name)}
    uses = {name: _names(node) for name, node in definitions.items()}
    found = {name for name, node in definitions.items() if any(map(_is_gpu, ast.walk(node)))}
    while more := {name for name, used in uses.items() if name not in found and used & found}:
        found |= more
    return frozenset(found)


def _names(node: ast.AST) -> set[str]:
    """Return every name and argument: fixtures are arguments."""
    names = (getattr(each, "id", None) or getattr(each, "arg", None) for each in ast.walk(node))
    return {name for name in names if name}


def _is_gpu(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(_GPU.match(node.value))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m fast`, leave files without fast tests unread: importing all of them takes longer than the fast ones."""
    listed = {entry.partition("::")[0] for entry in FAST}
    is_test = collection_path.suffix == ".py" and collection_path.is_relative_to(TESTS)
    left_out = is_test and collection_path.relative_to(TESTS).as_posix() not in listed
    return True if left_out and config.option.markexpr == "fast" else None


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        function = getattr(item, "originalname", item.name)
        if is_fast(item.path, function):
            item.add_marker(pytest.mark.fast)
        if function in describing(item.path):
            item.add_marker(pytest.mark.aot)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    global _unmarked
    _unmarked = None if item.get_closest_marker("aot") else item.nodeid
    try:
        return (yield)
    finally:
        _unmarked = None


_describe = topologies.get_topology_desc


def _for_marked_tests(*arguments: object, **options: object) -> object:
    if _unmarked is not None:
        pytest.fail(f"a test that describes GPUs is marked aot; given {_unmarked}: write @pytest.mark.aot above it")
    return _describe(*arguments, **options)  # type: ignore[arg-type]


topologies.get_topology_desc = _for_marked_tests
