"""The list of fast tests names what there is and covers every package; what describes GPUs is found and marked."""

import ast
import textwrap

import markers
import pytest
from test_packages import ORDER

from jdp.foresight.targets.resolve import target


@pytest.mark.parametrize("entry", markers.FAST)
def test_what_is_listed_as_fast_exists(entry):
    path, _, function = entry.partition("::")
    tree = ast.parse((markers.TESTS / path).read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert function in names if function else any(name.startswith("test_") for name in names)


@pytest.mark.parametrize("package", ORDER)
def test_some_tests_of_every_package_are_fast(package):
    assert [entry for entry in markers.FAST if entry.startswith(f"{package}/")]


def test_a_fast_test_bears_the_marker(request):
    assert request.node.get_closest_marker("fast")
    assert not request.node.get_closest_marker("aot")


def test_whatever_leads_to_a_described_gpu_is_found():
    text = """
        CASES = {"small": "h100:1x8"}

        def devices():
            return target("a100:1x1").devices

        @pytest.fixture
        def step():
            return compiled(devices())

        @pytest.mark.parametrize("name", CASES)
        def test_by_its_cases(name): ...

        def test_by_a_fixture(step): ...

        def test_by_its_text():
            verify(step, state, batch, "b200:2x8")

        def test_on_cpu():
            target("cpu:8")

        def test_of_a_word():
            assert "h1000" == "h200x"
    """
    found = markers.names_describing(textwrap.dedent(text))
    assert {name for name in found if name.startswith("test_")} == {
        "test_by_its_cases",
        "test_by_a_fixture",
        "test_by_its_text",
    }


def test_describing_gpus_without_the_marker_is_an_error():
    with pytest.raises(pytest.fail.Exception, match=r"write @pytest.mark.aot above it"):
        target("h1" + "00:1x8")  # in one piece it would be found, and this test marked
