"""A file of the bytes and times of a step, by kind of collective and source line, for a later comparison.

Source lines are relative to the repository and kept with their text, so a line is recognised after it has moved.
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
"""Format of the file; a later format is refused."""


class BaselineError(UserError):
    """A file is not a baseline."""


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

    program: str
    target: str
    jax: str  # its version
    mesh: dict[str, int]
    sent: tuple[SentFrom, ...]  # most bytes first
    held: HeldBytes
    step_seconds: float | None  # simulated; None if the target's rates are not published
    format: int = FORMAT

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends per step."""
        return sum(each.wire_bytes for each in self.sent)

    @property
    def collectives(self) -> int:
        """Number of collectives per step."""
        return sum(each.count for each in self.sent)

    def to_json(self) -> dict[str, Any]:
        """Return the file's object."""
        return {"format": self.format, **asdict(self)}

    def to_text(self) -> str:
        """Return the file's text, with a number per line for diffs."""
        return json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"


def baseline_of(report: StepReport, program: str, root: Path) -> Baseline:
    """Return a report's numbers; source lines are relative to `root`."""
    is_cpu = report.target.startswith("cpu:")  # CPU rates are measured on each machine
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
    """Read a file of `Baseline.to_text`. Raises BaselineError."""
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
    """Sum the bytes by kind and line."""
    lines = dict[tuple[str, str | None], SentFrom]()
    for each in sent:
        source = each.source
        named, text = (None, "") if source is None else (_from_root(source, root), _text(source))
        line = lines.get((each.kind, source), SentFrom(each.kind, named, text, 0, 0.0))
        wire = line.wire_bytes + each.wire_bytes
        lines[each.kind, source] = replace(line, count=line.count + each.count, wire_bytes=wire)
    return tuple(sorted(lines.values(), key=lambda each: (-each.wire_bytes, each.kind, each.source or "")))


def _from_root(source: str, root: Path) -> str:
    """Return "file:line" without the machine's folders: relative to the repository or to the installed packages."""
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
