"""`pytest --tenth COMMIT --within SECONDS`: the tenth of the tests that a commit's hash picks, as far as time allows.

Every test belongs to one of ten parts by the hash of its name. `.ci/run` runs one part of the slow tests, and after
some commits all of them have run. A test that would begin after SECONDS is skipped, which says why and fails nothing.
"""

import re
import time
import zlib

import pytest

OVER = "the time given with --within is over"
_deadline = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tenth", metavar="COMMIT", type=tenth_of, help="run a tenth of the tests, by a commit's hash")
    parser.addoption("--within", metavar="SECONDS", type=float, help="skip the tests that would begin later")


def tenth_of(commit: str) -> int:
    """Return the tenth, 0 to 9, that a commit's hash picks."""
    if not re.fullmatch("[0-9a-f]+", commit):
        raise ValueError(f"--tenth takes a commit's hash; given {commit!r}: write --tenth $(git rev-parse HEAD).")
    return int(commit, 16) % 10


def tenth_with(name: str) -> int:
    """Return the tenth that a test belongs to."""
    return zlib.crc32(name.encode()) % 10


def pytest_configure(config: pytest.Config) -> None:
    if (seconds := config.getoption("--within")) is not None:
        config.stash[_deadline] = time.monotonic() + seconds


def pytest_report_header(config: pytest.Config) -> str | None:
    tenth = config.getoption("--tenth")
    return None if tenth is None else f"tenth: {tenth} of 0 to 9"


@pytest.hookimpl(trylast=True)  # of what `-m` and `-k` select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (tenth := config.getoption("--tenth")) is None:
        return
    left_out = [item for item in items if tenth_with(item.nodeid) != tenth]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if tenth_with(item.nodeid) == tenth]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() > item.config.stash.get(_deadline, float("inf")):
        pytest.skip(OVER)
