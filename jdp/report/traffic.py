"""What each candidate sends, as a section of a page: compared with theory, breaches with remedies, all collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jdp.base.formatting import format_bytes
from jdp.core.sharding.axes import factors
from jdp.foresight.step_report import StepReport
from jdp.foresight.traffic.contract import SLACK, TOLERANCE, MeshCollective, Row
from jdp.foresight.verify import Report
from jdp.report.page import CHOSEN, Markup, details, element, joined, paragraphs, table, tagged

MOST_ROWS = 600
"""Rows of collectives on a page; of a candidate with more than its share, those that send most."""


def traffic(reports: Sequence[tuple[str, Report]], chosen: str | None) -> Markup:
    """Return the section's body."""
    if not reports:
        return element("p", "No candidate compiled, so nothing was counted.")
    rows = [(name, row, verdict) for name, report in reports for row, verdict in _rows(report)]
    most = max(10, MOST_ROWS // len(reports))
    return joined(
        [
            element("p", _INTRODUCTION, class_="note"),
            table(
                _HEADERS,
                [
                    [name, *row.cells(), format_bytes(row.theory_wire_bytes) if row.expected_bytes else "–", verdict]
                    for name, row, verdict in rows
                ],
                words=("kind", "contract"),
                classes=["bad" if verdict == _BROKEN else None for _, _, verdict in rows],
            ),
            *(_candidate(name, report, most, is_choice=name == chosen) for name, report in reports),
        ]
    )


_INTRODUCTION = (
    "Payloads are whole tensors, a step, loops counted as often as they run. Bytes on the wire are what one device "
    "sends by the ring algorithms: 2(N−1)/N of an all-reduce's payload, (N−1)/N of the others'. A candidate "
    f"keeps the contract when it sends at most {TOLERANCE:g} times what its strategy promises, and nothing else above "
    f"{SLACK:.0%} of that, beside the all-reduce of parameters too small to shard."
)
_HEADERS = (
    *("candidate", "kind", "expected", "found", "found / expected", "in the microbatch loop", "on the wire"),
    *("in theory", "contract"),
)


_KEPT, _BROKEN = element("span", "kept", class_="tag good"), element("span", "broken", class_="tag bad")


def _rows(report: Report) -> Iterator[tuple[Row, Markup]]:
    """Yield each kind with the verdict on it. One kind may send more than promised where others send less."""
    for row in report.rows:
        if report.kept is None:
            yield row, Markup("not judged")
        else:
            yield row, _KEPT if row.kept else Markup("more, but all kinds together less") if report.kept else _BROKEN
    yield from ((row, Markup("the model’s own axes")) for row in report.model_axes)
    if report.statistics is not None:
        yield report.statistics, Markup("batch statistics or metrics")


def _candidate(name: str, report: Report, most: int, *, is_choice: bool) -> Markup:
    wire, promised = report.wire_bytes_per_device, report.theory_wire_bytes_per_device
    sends = f"a device sends {format_bytes(wire)} a step ({wire:,.0f} bytes)"
    against = f", {report.ratio:.3f} of theory’s {format_bytes(promised)} ({promised:,.0f})" if promised else ""
    partitioned = f"Partitioning {report.partitioning}: {report.why}." if report.partitioning else ""
    return joined(
        [
            element("h3", tagged(name, CHOSEN if is_choice else None)),
            element("p", f"On {factors(report.mesh)}, {sends}{against}. {partitioned}"),
            paragraphs([*filter(None, [report.like_zero2])]),
            findings(report),
            _collectives(report.collectives, most, is_open=is_choice),
        ]
    )


def findings(report: StepReport) -> Markup:
    """Return what a report says of one step, a paragraph a sentence."""
    return joined(
        [
            paragraphs(report.breaches, "breach"),
            paragraphs(report.symptoms),
            paragraphs([f"Sent besides: {stray}" for stray in report.strays]),
            paragraphs([f"Note: {note}" for note in report.notes], "note"),
        ]
    )


# Collectives.

_LISTED = (
    *("collective", "dtype", "payload", "times a step", "microbatch loop", "axes", "devices", "asynchronous"),
    *("on the wire", "source"),
)


def _collectives(found: Sequence[MeshCollective], most: int, *, is_open: bool) -> Markup:
    if not found:
        return element("p", "Nothing is sent.")
    groups = sorted(_alike(found), key=lambda same: -_wire(same))
    rows = [_collective(same) for same in groups[:most]]
    if left := groups[most:]:
        more = f"{sum(map(len, left))} more"
        rows.append([more, *[""] * 7, format_bytes(sum(map(_wire, left))), ""])
    listed = table(_LISTED, rows, words=("dtype", "axes", "source", "microbatch loop"))
    return details(f"{len(found)} collectives in the program, those that send most first", listed, is_open=is_open)


def _alike(found: Iterable[MeshCollective]) -> Iterable[list[MeshCollective]]:
    """Group the collectives that are equal in everything shown."""
    groups: dict[tuple[object, ...], list[MeshCollective]] = {}
    for sent in found:
        c = sent.collective
        key = (c.kind, c.dtype, c.payload_bytes, sent.in_accumulation_loop, sent.axes, c.group_size, c.is_async)
        groups.setdefault((*key, c.count, c.source, c.caveats), []).append(sent)
    return groups.values()


def _wire(same: Iterable[MeshCollective]) -> float:
    return sum(sent.collective.wire_bytes for sent in same)


def _collective(same: Sequence[MeshCollective]) -> list[str]:
    sent = same[0]
    c = sent.collective
    times = f"{c.count:,}" if len(same) == 1 else f"{len(same)} × {c.count:,}"
    return [
        c.kind,
        c.dtype,
        f"{format_bytes(c.payload_bytes)}",
        f"≥ {times}" if c.caveats else times,
        "in" if sent.in_accumulation_loop else "out",
        ", ".join(sent.axes),
        f"{c.group_size}",
        "yes" if c.is_async else "no",
        format_bytes(_wire(same)),
        c.source or "–",
    ]
