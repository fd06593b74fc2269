"""A file of the bytes and times of a step, by kind of collective and source line, and a later comparison with it.

Source lines are relative to the repository and kept with their text, so a line is recognised after it has moved.

1. Lines are paired by place, else by text in the same file, else by equal bytes of one kind (`_pairs`).
2. A number is worse if it grew by more than the tolerance. A line must also grow by a thousandth of all bytes sent, so
   a metric's four bytes never count. If all lines together send less, no line is worse.
"""

from __future__ import annotations

import importlib.metadata
import json
import linecache
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from jdp.base.errors import UserError
from jdp.base.formatting import align_columns, format_bytes, format_seconds
from jdp.base.toml import brief, cut
from jdp.core.sharding.axes import factors
from jdp.foresight.memory import StepReport
from jdp.foresight.traffic.contract import TINY, Sent

_SHARE = 0.001  # of all bytes sent; a line that grows by less is never worse
_EQUAL = 1e-9  # of a float summed in another order
EQUAL, BETTER, WORSE, OTHER = "equal", "better", "worse", "changed"
SENT, HELD, HOST, TIME = "sent a device", "held a device", "held in the host's memory", "time of a step, simulated"
_HEADINGS = ("", "at", "before", "now", "change", "verdict")


@dataclass(frozen=True)
class SentFrom:
    """The bytes that one kind of collective sends from one source line."""

    kind: str
    source: str | None  # "train.py:14", relative to the repository; None: the program has no line for it
    text: str  # of that line
    count: int  # collectives per step, iterations of loops included
    wire_bytes: float  # bytes that each device sends per step


@dataclass(frozen=True)
class HeldBytes:
    """Bytes per device."""

    arguments: int
    results: int  # results that do not reuse an argument's memory
    temporaries: int
    total: int
    host: int  # in the host's memory, not counted in the others
    fits: bool | None  # in a device; None if its memory is unknown


@dataclass(frozen=True)
class Baseline:
    """A compiled step in numbers."""

    format: Literal[1]  # of the file; a later format is refused
    program: str
    target: str
    jax: str  # its version
    mesh: dict[str, int]
    sent: tuple[SentFrom, ...]  # most bytes first
    held: HeldBytes
    step_seconds: float | None  # simulated; None if the target's rates are not published

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends per step."""
        return sum(each.wire_bytes for each in self.sent)

    def to_text(self) -> str:
        """Return the file's text, with a number per line for diffs."""
        return json.dumps(asdict(self), indent=1, allow_nan=False) + "\n"


def baseline_of(report: StepReport, program: str, root: Path) -> Baseline:
    """Return a report's numbers; source lines are relative to `root`."""
    is_cpu = report.target.startswith("cpu:")  # CPU rates are measured on each machine
    seconds = None if report.timeline is None or is_cpu else report.timeline.step_seconds
    memory, fits = report.memory, None if report.headroom is None else report.headroom.fits
    arguments = sum(each.bytes for each in memory.arguments)
    held = HeldBytes(arguments, memory.results, memory.temporaries, memory.total, memory.host, fits)
    sent, version = _by_line(report.sent, root), importlib.metadata.version("jax")
    return Baseline(1, program, report.target, version, dict(report.mesh), sent, held, seconds)


def read_baseline(path: Path) -> Baseline:
    """Read a file of `Baseline.to_text`. Raises UserError."""
    try:
        return TypeAdapter(Baseline).validate_json(path.read_bytes())
    except OSError as error:
        why = error.strerror
    except ValidationError as error:
        first = min(error.errors(), key=lambda each: each["loc"] != ("format",))
        why = ": ".join([*map(str, first["loc"]), first["msg"].replace("Input should", "it should")])
    what = f"a baseline is a file of jdp verify; given {brief(str(path))}"
    raise UserError(f"{what}: {why}; write it with jdp verify PROGRAM --save FILE")


def _by_line(sent: Iterable[Sent], root: Path) -> tuple[SentFrom, ...]:
    lines = dict[tuple[str, str | None], SentFrom]()
    for each in sent:
        source = each.source
        file, _, number = (source or "").rpartition(":")
        text = cut(linecache.getline(file, int(number)).strip(), 200) if number.isdecimal() else ""
        # Relative to the repository or to the installed packages, because other machines have other folders.
        named = None if source is None else re.split("/(?:site|dist)-packages/", source.removeprefix(f"{root}/"))[-1]
        line = lines.get((each.kind, source), SentFrom(each.kind, named, text, 0, 0.0))
        wire = line.wire_bytes + each.wire_bytes
        lines[each.kind, source] = replace(line, count=line.count + each.count, wire_bytes=wire)
    return tuple(sorted(lines.values(), key=lambda each: (-each.wire_bytes, each.kind, each.source or "")))


# The comparison.


@dataclass(frozen=True)
class Row:
    """A number before and now."""

    what: str  # "sent a device", "all-gather"
    at: str  # "train.py:14", or empty
    before: float | None  # None: absent
    now: float | None
    verdict: str  # equal, better, worse, or changed (by less than the tolerance, or not compared)
    unit: str = "bytes"  # or seconds, or empty

    @property
    def change(self) -> str:
        """The relative change in words; empty if the numbers are equal."""
        if self.before is None or self.now is None or not (self.before or self.verdict == EQUAL):
            return "gone" if self.now is None else "new"
        share = 0.0 if self.verdict == EQUAL else self.now / self.before - 1
        return f"{'+' if share > 0 else '−'}{_percent(abs(share))}" if share else ""

    def cells(self, *, code: bool = False) -> tuple[str, ...]:
        """Return the cells of the row, in Markdown if `code`."""
        at = f"`{self.at}`" if code and self.at else self.at
        verdict = f"**{self.verdict}**" if code and self.verdict == WORSE else self.verdict
        return self.what, at, _shown(self.before, self.unit), _shown(self.now, self.unit), self.change, verdict


@dataclass(frozen=True)
class Comparison:
    """A step compared with its baseline."""

    name: str  # of the program
    target: str
    baseline: str  # its file
    tolerance: float
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The worst verdict of the rows: worse, better, changed within the tolerance, or equal."""
        verdicts = {row.verdict for row in self.rows}
        return next((each for each in (WORSE, BETTER, OTHER) if each in verdicts), EQUAL)

    @property
    def heading(self) -> str:
        worse = [" at ".join(filter(None, (row.what, row.at))) for row in self.rows if row.verdict == WORSE]
        more = f" and {len(worse) - 4} more" if len(worse) > 4 else ""
        return {
            EQUAL: f"Equal to {self.baseline}.",
            OTHER: f"Within {_percent(self.tolerance)} of {self.baseline}.",
            BETTER: f"Better than {self.baseline}.",
            WORSE: f"WORSE than {self.baseline} by more than {_percent(self.tolerance)}: {', '.join(worse[:4])}{more}.",
        }[self.verdict]

    def __str__(self) -> str:
        lines = align_columns([_HEADINGS, *(row.cells() for row in self.rows)])
        notes = ["", "Notes:", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join([f"{self.name} for {self.target}", self.heading, "", *lines, *notes])

    def to_markdown(self) -> str:
        """Return a table for a pull request: changes are shown, the rest is folded."""
        parts = [f"**jdp verify** `{self.name}` for `{self.target}`: {self.heading}"]
        if changed := [row.cells(code=True) for row in self.rows if row.verdict != EQUAL]:
            parts.append(markdown_table(_HEADINGS, changed))
        if same := [row.cells(code=True) for row in self.rows if row.verdict == EQUAL]:
            title = f"{len(same)} number{'s' * (len(same) > 1)} did not change"
            folded = markdown_table(_HEADINGS, same)
            parts.append(f"<details><summary>{title}</summary>\n\n{folded}\n\n</details>")
        return "\n\n".join([*parts, *(f"> {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def numbers(step: Baseline) -> dict[str, tuple[float, str]]:
    """Return name -> (number, unit) of a step as a whole."""
    held, collectives = step.held, sum(each.count for each in step.sent)
    found: dict[str, tuple[float, str]] = {
        SENT: (step.wire_bytes, "bytes"),
        "collectives": (collectives, ""),
        HELD: (held.total, "bytes"),
        **{f"of it {part}": (getattr(held, part), "bytes") for part in ("arguments", "results", "temporaries")},
        HOST: (held.host, "bytes"),
    }
    return found if step.step_seconds is None else {**found, TIME: (step.step_seconds, "seconds")}


def compare(before: Baseline, now: Baseline, *, tolerance: float, file: str) -> Comparison:
    """Compare two steps of one target; `tolerance` is a fraction. Raises ValueError for two targets."""
    if before.target != now.target:
        raise UserError(
            f"a baseline is compared on its own target; given {file} of {before.target}, and --target {now.target}: "
            f"give --target {before.target}, or save a baseline of {now.target}"
        )
    rows, then = list[Row](), numbers(before)
    for what, (number, unit) in numbers(now).items():
        if what not in then or (what == HOST and not (number or then[what][0])):
            continue
        old = then[what][0]
        verdict = _verdict(old, number, tolerance, 0 if what == TIME else TINY)
        if what not in (SENT, HELD, HOST, TIME) and verdict != EQUAL:
            verdict = OTHER  # not compared
        rows.append(Row(what, "", old, number, verdict, unit))
        if what == SENT:
            rows += _lines(before, now, tolerance, verdict == BETTER)
        if what == HELD and before.held.fits is not False and now.held.fits is False:
            rows.append(Row("more than a device has", "", old, number, WORSE))
    versions = f"{file} was saved with jax {before.jax}, and this is jax {now.jax}"
    notes = {
        f"{versions}: a difference may be the compiler's; compare with one version to know": before.jax != now.jax,
        f"the mesh was {factors(before.mesh)}, and is {factors(now.mesh)}": before.mesh != now.mesh,
        f"{file} was saved for {before.program}": before.program != now.program,
    }
    kept = tuple(note for note, differs in notes.items() if differs)
    return Comparison(now.program, now.target, file, tolerance, tuple(rows), kept)


def _lines(before: Baseline, now: Baseline, tolerance: float, all_send_less: bool) -> Iterator[Row]:
    """Yield a row for each line, and one for all lines that send hardly anything."""
    least, small = max(TINY, _SHARE * before.wire_bytes), list[tuple[float, float]]()
    for old, new in _pairs(before.sent, now.sent):
        was, is_now = (0.0 if each is None else each.wire_bytes for each in (old, new))
        if max(was, is_now) <= least:
            small.append((was, is_now))
        elif (one := new or old) is not None:
            verdict = _verdict(was, is_now, tolerance, least)
            verdict = OTHER if all_send_less and verdict == WORSE else verdict
            yield Row(one.kind, one.source or "", old and was, new and is_now, verdict)
    if small:
        was, is_now = map(sum, zip(*small, strict=True))
        verdict = EQUAL if was == is_now else OTHER
        yield Row(f"{len(small)} smaller line{'s' * (len(small) > 1)}", "", was, is_now, verdict)


def _verdict(old: float, new: float, tolerance: float, least: float) -> str:
    if abs(new - old) <= _EQUAL * max(old, new):
        return EQUAL
    if new - old > max(tolerance * old, least):
        return WORSE
    return BETTER if old - new > max(tolerance * old, least) else OTHER


# Pairs of lines.


def _pairs(before: Sequence[SentFrom], now: Sequence[SentFrom]) -> list[tuple[SentFrom | None, SentFrom | None]]:
    """Return each earlier line with the same line now, most bytes first; None if one of the two is missing."""
    left, unpaired, pairs = [*before], [*now], list[tuple[SentFrom | None, SentFrom | None]]()
    for identity in _IDENTITIES:
        for new in [*unpaired]:
            old = next((each for each in left if identity(each) == identity(new)), None)
            if old is not None:
                pairs.append((old, new))
                left.remove(old)
                unpaired.remove(new)
    pairs += [(old, None) for old in left] + [(None, new) for new in unpaired]
    return sorted(pairs, key=lambda pair: -max(each.wire_bytes for each in pair if each is not None))


_IDENTITIES: tuple[Callable[[SentFrom], Any], ...] = (
    lambda line: (line.kind, line.source, line.text),
    lambda line: (line.kind, (line.source or "").rpartition(":")[0], line.text),
    lambda line: (line.kind, f"{line.wire_bytes:.9g}" if line.wire_bytes else (line.source, line.text)),
    lambda line: (line.kind, line.source),
)
"""Functions of a line; two lines with the same result are paired. The most reliable function comes first."""

# Tables.


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    return {"bytes": format_bytes, "seconds": format_seconds}.get(unit, lambda count: f"{count:.0f}")(value)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.3g} %"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    dashes = ["---:" if heading in ("before", "now", "change", "value") else "---" for heading in headings]
    lines = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in (headings, dashes, *rows))
    return "\n".join(f"| {line} |" for line in lines)


def report_markdown(step: Baseline) -> str:
    """Return the bytes of a step by line, its memory and its time."""
    rows = list[tuple[str, str, str]]()
    for what, (number, unit) in numbers(step).items():
        fits = {None: "", True: "fits", False: "more than a device has"}[step.held.fits] if what == HELD else ""
        rows += [(what, fits, _shown(number, unit))] if number or what != HOST else []
        if what == SENT:
            rows += [
                (each.kind, f"`{each.source}`" * bool(each.source), format_bytes(each.wire_bytes)) for each in step.sent
            ]
    title = f"**jdp verify** `{step.program}` on {factors(step.mesh)} for `{step.target}`"
    return f"{title}\n\n{markdown_table(('', 'at', 'value'), rows)}"
