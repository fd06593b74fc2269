"""`pytest --processor-times FILE`: what each test takes of the processor, the processes that it starts included.

A line of JSON a test, [name, seconds here, seconds of processes that ended], and at the end a table by folders of all
lines in FILE, those of earlier runs too. The wall clock says little where other programs run beside; processor time
grows too, but only by the caches they share.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processor-times", metavar="FILE", help="append what each test takes of the processor to FILE")


def _file(config: pytest.Config) -> Path | None:
    given = config.getoption("--processor-times")
    return Path(given) if given else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if (file := _file(item.config)) is None:
        return (yield)
    before = os.times()
    result = yield
    now = os.times()
    here = now.user + now.system - before.user - before.system
    ended = now.children_user + now.children_system - before.children_user - before.children_system
    with file.open("a", encoding="utf-8") as times:  # workers append their lines to one file
        times.write(json.dumps([item.nodeid, round(here, 3), round(ended, 3)]) + "\n")
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    file = _file(config)
    if file is None or not file.exists():
        return
    folders = Counter[str]()
    for line in file.read_text(encoding="utf-8").splitlines():
        name, here, ended = json.loads(line)
        folders[Path(name.partition("::")[0]).parent.as_posix()] += here + ended
    terminalreporter.section("processor time of the tests")
    for folder, seconds in (*folders.most_common(), ("all", folders.total())):
        terminalreporter.write_line(f"{seconds:8.1f} s  {folder}")
