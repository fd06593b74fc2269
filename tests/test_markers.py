"""The lists of fast tests and of the rest name what there is, and every promise keeps a default test."""

import ast
import textwrap

import markers
import promises
import pytest
import rest
from parsed_modules import ORDER

import jdp
from jdp.cli.main import COMMANDS
from jdp.foresight.targets.resolve import target

PROMISES = {**promises.NAMES, **promises.COMMANDS, **promises.CONTRACTS}


def exists(entry):
    """Return whether a file has the function of tests, or any where the entry names none."""
    path, _, function = entry.partition("::")
    tree = ast.parse((markers.TESTS / path).read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return function in names if function else any(name.startswith("test_") for name in names)


def test_what_is_listed_exists():
    functions = (entry.removesuffix("::*").partition("[")[0] for entry in (*rest.staying(), *PROMISES.values()))
    listed = {*markers.FAST, *functions, *rest.WITHOUT_DEFAULT}
    assert [entry for entry in sorted(listed) if not exists(entry)] == []


@pytest.mark.parametrize("package", ORDER)
def test_some_tests_of_every_package_are_fast(package):
    assert [entry for entry in markers.FAST if entry.startswith(f"{package}/")]


def test_a_fast_test_bears_the_marker(request):
    assert request.node.get_closest_marker("fast")
    assert not request.node.get_closest_marker("aot")


def test_every_promise_has_a_default_test():
    """Without an id, any of a function holds the promise; one with ids in `REST` is named with an id that stays."""
    assert promises.NAMES.keys() == {*jdp.__all__} - {"__version__"}
    assert promises.COMMANDS.keys() == COMMANDS.keys()
    tests = {promise: test.partition("[") for promise, test in PROMISES.items()}
    out = [promise for promise, (function, _, name) in tests.items() if rest.is_left_out(function, name[:-1])]
    assert out == []


def test_a_fast_test_is_a_default_test():
    assert not [entry for entry in markers.FAST if "::" in entry and rest.is_left_out(entry)]


def collected(request):
    """What this run collected of files that it collected in full."""
    if any("::" in argument for argument in request.config.args):
        return []
    return request.config.stash[rest.COLLECTED]


def test_every_file_has_a_default_test(request):
    """Of the files that this run collected: with `pytest` all of them."""
    tests = collected(request)
    files = {test.function.partition("::")[0] for test in tests}
    without = files - {test.function.partition("::")[0] for test in tests if test.default}
    assert without == files & rest.WITHOUT_DEFAULT.keys()


def test_ids_that_stay_are_there_and_others_are_not(request):
    """An id that was renamed would leave the default tests in silence. Of the files that this run collected."""
    tests = collected(request)
    ids = {test.function: [] for test in tests}
    for test in tests:
        ids[test.function].append(test.name)
    for function, patterns in rest.staying().items():
        names = ids.get(function, [])
        gone = [pattern.pattern for pattern in patterns if names and not any(map(pattern.fullmatch, names))]
        assert not gone, f"{function} has no id {gone}"
        assert not names or any(rest.is_left_out(function, name) for name in names), f"all of {function} stays"


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
