"""On a terminal a run prints the lines of a pipe, above one bar. No number is cut, no control character obeyed."""

import io
import re
import sys

import pytest
from tiny_experiment import tables, write_tiny
from tiny_runs import train

from jdp.base import notices
from jdp.base.formatting import escaped
from jdp.run.outputs import Display

ROW = {"loss": 1.2345, "accuracy": 0.51, "lr": 3e-4, "grad_norm": 12.5, "skipped": 1, "tokens_per_second": 20400.0}
_ERASED = re.compile(r"[^\n]*(\n(\x1b\[\?25h)?\r?\x1b\[1A)?\x1b\[2K")
"""The bar, before a line is printed in its place; or at the end, from the line below it."""
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_BAR = re.compile(r"step \d+/\d+ +[━╸╺]+")


class Terminal(io.StringIO):
    """A stream that is a terminal: `lines` are those that stay, `bars` those that were there for a moment."""

    def isatty(self):
        return True

    @property
    def lines(self):
        return [_ANSI.sub("", line).rstrip("\r") for line in _ERASED.sub("", self.getvalue()).split("\n")[:-1]]

    @property
    def bars(self):
        return [line for line in re.split(r"[\r\n]+", _ANSI.sub("", self.getvalue())) if _BAR.match(line)]


@pytest.fixture
def terminal(monkeypatch):
    """Makes stdout a terminal of a width."""

    def of(columns):
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "stdout", stream := Terminal())
        return stream

    return of


def logged(display):
    with display:
        for step in (1, 2, 3):
            display.step(step)
            display.log(step, ROW)
        display.say("saved [step] 3 :smile:")


@pytest.mark.parametrize("columns", [60, 120])
def test_lines_scroll_above_one_bar(columns, terminal, monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    monkeypatch.setattr(sys, "stdout", pipe := io.StringIO())
    logged(Display(1000))
    lines = pipe.getvalue().splitlines()
    row = "loss 1.234  accuracy 0.51  lr 3.00e-04  grad_norm 12.5  skipped 1  20.4k tokens/s"
    assert lines[1] == f"step    2/1000  {row}  0:00 to go" and lines[-1] == "saved [step] 3 :smile:"
    got = terminal(columns)
    logged(Display(1000))
    assert all(len(line) <= columns for line in got.lines)
    assert (len(got.lines) == len(lines)) == (columns == 120)
    assert "\n".join(got.lines).replace("\n    ", "  ") == "\n".join(lines)
    assert got.bars and all(len(bar) <= columns for bar in got.bars)
    assert re.search(r"step 3/1000 .* 0:00 to go  20.4k tokens/s", got.bars[-1])


def test_first_notices_take_at_most_three_lines(tmp_path, monkeypatch, capsys):
    """Warnings are not counted; --verbose prints all; after the start all are printed."""

    def printed(count, wanted=True):
        monkeypatch.setattr(notices, "_said", set())
        with notices.in_few_lines(wanted):
            for number in range(count):
                notices.notice_anywhere(f"choice {number}")
            notices.warn("damage")
            notices.end_of_start()
            notices.notice_anywhere("later")
        return capsys.readouterr().err.replace("jdp: ", "").split("\n")[:-1]

    assert printed(3) == ["choice 0", "choice 1", "damage", "choice 2", "later"]
    assert printed(7) == ["choice 0", "choice 1", "damage", "5 more notices: --verbose", "later"]
    assert printed(7, wanted=False) == [*(f"choice {number}" for number in range(7)), "damage", "later"]
    monkeypatch.setattr(notices, "_said", set())
    file = write_tiny(tmp_path, tables(train={"steps": 1, "batch_size": 8}), top='strategy = "zero1"\n')
    train(file, name="few")
    few = [line for line in capsys.readouterr().err.splitlines() if line.startswith("jdp: ")]
    assert len(few) == 3 and re.fullmatch(r"jdp: \d+ more notices: --verbose", few[2])


def test_a_models_text_gives_a_terminal_no_orders(terminal):
    assert escaped("a\x1b[2Jb\tc\n\r\x9b\x00é") == "a\\x1b[2Jb\tc\n\\r\\x9b\\x00é"
    got = terminal(60)
    Display(1).show_text("sample", "red\x1b[31m")
    assert got.lines == ["sample:", "red\\x1b[31m"]
