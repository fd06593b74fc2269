"""Every promise and every file keep a default test, and markers are where they belong."""

import markers
import promises
import pytest
from paths import TESTS

import jdp
from jdp.cli.main import COMMANDS
from jdp.foresight.targets.resolve import target

PROMISES = {**promises.NAMES, **promises.COMMANDS, **promises.CONTRACTS}


@pytest.fixture
def collected(request):
    """What this run collected of files that it collected in full."""
    return [] if any("::" in argument for argument in request.config.args) else request.config.stash[markers.COLLECTED]


def test_every_promise_has_a_default_test(collected):
    """Without an id, any of a function holds the promise. Of the files that this run collected: with `pytest` all."""
    assert promises.NAMES.keys() == {*jdp.__all__} - {"__version__"}
    assert promises.COMMANDS.keys() == COMMANDS.keys()
    files = {item.path.name for item in collected}
    default = {f"{item.path.name}::{item.name}" for item in collected if markers.is_default(item)}
    default |= {name.partition("[")[0] for name in default}
    there = {path.name for path in TESTS.rglob("test_*.py")}
    names = {promise: test.partition("::")[0] for promise, test in PROMISES.items()}
    assert [promise for promise, name in names.items() if name not in there] == []
    assert [promise for promise, name in names.items() if name in files and PROMISES[promise] not in default] == []


def test_files_without_default_tests_say_so(collected):
    """By a `pytestmark`, with the reason above it."""
    default = {item.path for item in collected if markers.is_default(item)}
    marked = {item.path for item in collected if not markers.is_default(item.getparent(pytest.Module))}
    assert {item.path for item in collected} - default == marked


def test_describing_gpus_without_the_marker_is_an_error():
    with pytest.raises(pytest.fail.Exception, match=r"write @pytest.mark.aot above it"):
        target("h100:1x8")
