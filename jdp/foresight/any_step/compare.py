"""Compare a step with its baseline: what it sends by kind and line, what it holds, and how long it takes.

1. Lines are paired: the same place; else the same text in the same file; else equal bytes of one kind (`_pairs`).
2. A number is worse where it grew by more than the tolerance. A line must also grow by a thousandth of all that is
   sent, so that a metric's four bytes are not worse. Where all lines together send less, no line is worse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from jdp.base.formatting import align_columns, format_bytes, format_seconds
from jdp.core.sharding.axes import factors
from jdp.foresight.any_step.baseline import Baseline, SentFrom
from jdp.foresight.traffic.contract import TINY

_SHARE = 0.001  # of all that is sent, below which a line is never worse
_EQUAL = 1e-9  # of a float that went through sums in another order
PARTS = ("arguments", "results", "temporaries")
EQUAL, BETTER, WORSE, OTHER = "equal", "better", "worse", "changed"


@dataclass(frozen=True)
class Row:
    """A number before and now."""

    what: str  # "sent a device", "all-gather"
    at: str  # "train.py:14", or empty
    before: float | None  # None: not there
    now: float | None
    verdict: str  # equal, better, worse, or changed: by less than the tolerance, or not compared
    unit: str = "bytes"  # or seconds, or empty

    @classmethod
    def of(cls, what: str, before: float, now: float, tolerance: float, least: float) -> Row:
        """Compare two numbers; what differs by `least` or less is only changed."""
        return cls(what, "", before, now, _verdict(before, now, tolerance, least))


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
        """The worst of the rows: worse, better, changed within the tolerance, or equal."""
        verdicts = {row.verdict for row in self.rows}
        return next((each for each in (WORSE, BETTER, OTHER) if each in verdicts), EQUAL)

    @property
    def heading(self) -> str:
        """The verdict in a sentence."""
        worse = [" at ".join(filter(None, (row.what, row.at))) for row in self.rows if row.verdict == WORSE]
        what = {
            EQUAL: f"Equal to {self.baseline}",
            OTHER: f"Within {_percent(self.tolerance)} of {self.baseline}",
            BETTER: f"Better than {self.baseline}",
            WORSE: f"WORSE than {self.baseline} by more than {_percent(self.tolerance)}: {', '.join(worse[:4])}",
        }
        more = f" and {len(worse) - 4} more" if len(worse) > 4 else ""
        return f"{what[self.verdict]}{more}."

    def __str__(self) -> str:
        lines = align_columns([_HEADINGS, *map(_cells, self.rows)])
        notes = [f"- {note}" for note in self.notes]
        parts = [f"{self.name} for {self.target}\n{self.heading}", "\n".join(lines)]
        return "\n\n".join([*parts, *(["\n".join(["Notes:", *notes])] if notes else [])])

    def to_markdown(self) -> str:
        """Return a table for a pull request: what changed is open, the rest is folded."""
        changed = [row for row in self.rows if row.verdict != EQUAL]
        same = [row for row in self.rows if row.verdict == EQUAL]
        parts = [f"**jdp verify** `{self.name}` for `{self.target}`: {self.heading}"]
        parts += [markdown_table(_HEADINGS, [_cells(row, code=True) for row in changed])] if changed else []
        if same:
            title = f"{len(same)} number{'s' * (len(same) > 1)} did not change"
            folded = markdown_table(_HEADINGS, [_cells(row, code=True) for row in same])
            parts.append(f"<details><summary>{title}</summary>\n\n{folded}\n\n</details>")
        return "\n\n".join([*parts, *(f"> {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain objects."""
        return {**asdict(self), "verdict": self.verdict, "rows": [asdict(row) for row in self.rows]}


def compare(before: Baseline, now: Baseline, *, tolerance: float, file: str) -> Comparison:
    """Compare two steps of one target; `tolerance` is a fraction. Raises ValueError for two targets."""
    if before.target != now.target:
        raise ValueError(
            f"a baseline is compared on its own target; given {file} of {before.target}, and --target {now.target}: "
            f"give --target {before.target}, or save a baseline of {now.target}"
        )
    rows = [Row.of("sent a device", before.wire_bytes, now.wire_bytes, tolerance, TINY)]
    rows += _lines(before, now, tolerance, rows[0].verdict == BETTER)
    rows += [_uncompared("collectives", before.collectives, now.collectives, "")]
    rows += [Row.of("held a device", before.held.total, now.held.total, tolerance, TINY)]
    rows += [_uncompared(f"of it {part}", getattr(before.held, part), getattr(now.held, part)) for part in PARTS]
    if before.held.host or now.held.host:
        rows.append(Row.of("held in the host's memory", before.held.host, now.held.host, tolerance, TINY))
    if before.held.fits is not False and now.held.fits is False:
        rows.append(Row("more than a device has", "", before.held.total, now.held.total, WORSE))
    if before.step_seconds is not None and now.step_seconds is not None:
        found = Row.of("time of a step, simulated", before.step_seconds, now.step_seconds, tolerance, 0)
        rows.append(replace(found, unit="seconds"))
    return Comparison(now.program, now.target, file, tolerance, tuple(rows), tuple(_notes(before, now, file)))


def _lines(before: Baseline, now: Baseline, tolerance: float, all_send_less: bool) -> Iterator[Row]:
    """Yield a row for each line, and one for those that send hardly anything."""
    least, small = max(TINY, _SHARE * before.wire_bytes), list[tuple[float, float]]()
    for old, new in _pairs(before.sent, now.sent):
        old_bytes, new_bytes = (0.0 if each is None else each.wire_bytes for each in (old, new))
        if max(old_bytes, new_bytes) <= least:
            small.append((old_bytes, new_bytes))
        elif (one := new or old) is not None:
            row = Row.of(one.kind, old_bytes, new_bytes, tolerance, least)
            verdict = OTHER if all_send_less and row.verdict == WORSE else row.verdict
            gone = {"before": None} if old is None else {"now": None} if new is None else {}
            yield replace(row, at=one.source or "", verdict=verdict, **gone)
    if small:
        was, is_now = map(sum, zip(*small, strict=True))
        yield _uncompared(f"{len(small)} smaller line{'s' * (len(small) > 1)}", was, is_now)


def _verdict(old: float, new: float, tolerance: float, least: float) -> str:
    if abs(new - old) <= _EQUAL * max(old, new):
        return EQUAL
    if new - old > max(tolerance * old, least):
        return WORSE
    return BETTER if old - new > max(tolerance * old, least) else OTHER


def _uncompared(what: str, old: float, new: float, unit: str = "bytes") -> Row:
    return Row(what, "", old, new, EQUAL if old == new else OTHER, unit)


def _notes(before: Baseline, now: Baseline, file: str) -> Iterator[str]:
    """Yield what else differs between the two."""
    if before.jax != now.jax:
        yield (
            f"{file} is of jax {before.jax}, and this is jax {now.jax}: a difference may be the compiler's; compare "
            "with one version to know"
        )
    if before.mesh != now.mesh:
        yield f"the mesh was {factors(before.mesh)}, and is {factors(now.mesh)}"
    if before.program != now.program:
        yield f"{file} is of {before.program}"


# Pairs of lines.

_Pair = tuple[SentFrom | None, SentFrom | None]


def _pairs(before: Sequence[SentFrom], now: Sequence[SentFrom]) -> list[_Pair]:
    """Return each line before with the same line now, most bytes first; None where there is no other."""
    left, pairs = [*before], list[_Pair]()
    unpaired = [*now]
    same: tuple[Callable[[SentFrom, SentFrom], bool], ...] = (
        lambda old, new: old.source == new.source and old.text == new.text,
        lambda old, new: _file(old) == _file(new) and old.text == new.text,
        lambda old, new: old.wire_bytes > 0 and abs(old.wire_bytes - new.wire_bytes) <= _EQUAL * old.wire_bytes,
        lambda old, new: old.source == new.source,
    )
    for is_same in same:
        for new in [*unpaired]:
            old = next((each for each in left if each.kind == new.kind and is_same(each, new)), None)
            if old is not None:
                pairs.append((old, new))
                left.remove(old)
                unpaired.remove(new)
    pairs += [(old, None) for old in left] + [(None, new) for new in unpaired]
    return sorted(pairs, key=lambda pair: -max(each.wire_bytes for each in pair if each is not None))


def _file(line: SentFrom) -> str:
    return (line.source or "").rpartition(":")[0]


# Tables.

_HEADINGS = ("", "at", "before", "now", "change", "verdict")


def _cells(row: Row, *, code: bool = False) -> tuple[str, ...]:
    at = f"`{row.at}`" if code and row.at else row.at
    verdict = f"**{row.verdict}**" if code and row.verdict == WORSE else row.verdict
    return row.what, at, _number(row.before, row.unit), _number(row.now, row.unit), _change(row), verdict


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    return {"bytes": format_bytes, "seconds": format_seconds}.get(unit, lambda count: f"{count:.0f}")(value)


def _change(row: Row) -> str:
    if row.before is None or row.now is None:
        return "new" if row.before is None else "gone"
    if row.verdict == EQUAL:
        return ""
    if not row.before:
        return "new"
    share = row.now / row.before - 1
    return f"{'+' if share > 0 else '−'}{_percent(abs(share))}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.3g} %"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in GitHub's Markdown."""
    dashes = ["---:" if heading in ("before", "now", "change", "bytes", "value") else "---" for heading in headings]
    lines = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in (headings, dashes, *rows))
    return "\n".join(f"| {line} |" for line in lines)


def report_markdown(step: Baseline) -> str:
    """Return what a step sends by line, holds and waits for."""
    held = step.held
    rows = [("sent a device", "", format_bytes(step.wire_bytes))]
    rows += [
        (each.kind, f"`{each.source}`" if each.source else "", format_bytes(each.wire_bytes)) for each in step.sent
    ]
    fits = {None: "", True: "fits", False: "more than a device has"}[held.fits]
    rows += [("held a device", fits, format_bytes(held.total))]
    rows += [(f"of it {part}", "", format_bytes(getattr(held, part))) for part in PARTS]
    rows += [("held in the host's memory", "", format_bytes(held.host))] if held.host else []
    if step.step_seconds is not None:
        rows.append(("time of a step, simulated", "", format_seconds(step.step_seconds)))
    title = f"**jdp verify** `{step.program}` on {factors(step.mesh)} for `{step.target}`"
    return f"{title}\n\n{markdown_table(('', 'at', 'value'), rows)}"
