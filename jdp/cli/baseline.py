"""What a step sends, holds and waits for, in a file: by kind of collective and source line, for a later comparison.

Lines are named from the folder of the repository, and kept with their text: a line is found again when others moved it.
"""

from __future__ import annotations

import importlib.metadata
import json
import linecache
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from jdp.base.errors import UserError
from jdp.base.toml import brief, cut
from jdp.foresight.step_report import StepReport
from jdp.foresight.traffic.sends import Sent

FORMAT = 1
"""Of the file; a file of a later format is refused."""


class BaselineError(UserError):
    """A file that is no baseline."""


@dataclass(frozen=True)
class SentFrom:
    """What one kind of collective sends from one line."""

    kind: str
    source: str | None  # "train.py:14", from the repository's folder; None: the program has no line for it
    text: str  # of that line
    count: int  # how many a step, rounds of loops included
    wire_bytes: float  # what each device sends, a step


@dataclass(frozen=True)
class HeldBytes:
    """Bytes per device."""

    arguments: int
    results: int  # those that are not written into an argument
    temporaries: int
    total: int
    host: int  # in the host's memory, in none of the others
    fits: bool | None  # in a device; None where its memory is not known


@dataclass(frozen=True)
class Baseline:
    """A compiled step in numbers."""

    program: str
    target: str
    jax: str  # its version
    mesh: dict[str, int]
    sent: tuple[SentFrom, ...]  # most bytes first
    held: HeldBytes
    step_seconds: float | None  # simulated; None where the target's rates are not published
    format: int = FORMAT

    @property
    def wire_bytes(self) -> float:
        """What each device sends, a step."""
        return sum(each.wire_bytes for each in self.sent)

    @property
    def collectives(self) -> int:
        """How many run in a step."""
        return sum(each.count for each in self.sent)

    def to_json(self) -> dict[str, Any]:
        """Return the file's object."""
        return {"format": self.format, **asdict(self)}

    def to_text(self) -> str:
        """Return the file's text, which differs by lines where the step does."""
        return json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"


def baseline_of(report: StepReport, program: str, root: Path) -> Baseline:
    """Return a report's numbers; `root` is the folder that source lines are named from."""
    is_cpu = report.target.startswith("cpu:")  # whose rates are measured anew on each machine
    seconds = None if report.timeline is None or is_cpu else report.timeline.step_seconds
    return Baseline(
        program,
        report.target,
        importlib.metadata.version("jax"),
        dict(report.mesh),
        _by_line(report.sent, root),
        _held(report),
        seconds,
    )


def read_baseline(path: Path) -> Baseline:
    """Read a file that `Baseline.to_text` made. Raises BaselineError."""
    what = f"a baseline is a file of jdp verify; given {brief(str(path))}"
    try:
        text = path.read_text("utf-8")
        found = json.loads(text)
        version = found.get("format") if isinstance(found, dict) else None
        if version == FORMAT:
            return TypeAdapter(Baseline).validate_json(text)
        why = f"it has {'no format' if version is None else f'format {brief(version)}'}, and {FORMAT} is read"
    except OSError as error:
        why = error.strerror
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))} is wrong ({first['msg']})"
    except ValueError:
        why = "it is not JSON"
    raise BaselineError(f"{what}: {why}; write it with jdp verify PROGRAM --save FILE")


def _held(report: StepReport) -> HeldBytes:
    memory, fits = report.memory, None if report.headroom is None else report.headroom.fits
    arguments = sum(each.bytes for each in memory.arguments)
    return HeldBytes(arguments, memory.results, memory.temporaries, memory.total, memory.host, fits)


def _by_line(sent: Iterable[Sent], root: Path) -> tuple[SentFrom, ...]:
    """Return what is sent, summed by kind and line."""
    lines = dict[tuple[str, str | None], SentFrom]()
    for each in sent:
        source = each.source
        named, text = (None, "") if source is None else (_from_root(source, root), _text(source))
        line = lines.get((each.kind, source), SentFrom(each.kind, named, text, 0, 0.0))
        wire = line.wire_bytes + each.wire_bytes
        lines[each.kind, source] = replace(line, count=line.count + each.count, wire_bytes=wire)
    return tuple(sorted(lines.values(), key=lambda each: (-each.wire_bytes, each.kind, each.source or "")))


def _from_root(source: str, root: Path) -> str:
    """Return "file:line" as it is on every machine: from the repository, or from where packages are installed."""
    name, _, line = source.rpartition(":")
    posix = name.replace("\\", "/")
    for installed in ("/site-packages/", "/dist-packages/"):
        if installed in posix:
            return f"{posix.rpartition(installed)[2]}:{line}"
    path = Path(name)
    return f"{path.relative_to(root).as_posix() if path.is_relative_to(root) else posix}:{line}"


def _text(source: str) -> str:
    name, _, line = source.rpartition(":")
    return cut(linecache.getline(name, int(line)).strip(), 200) if line.isdecimal() else ""
