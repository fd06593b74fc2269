"""The runs of a sweep: `optimizer.lr=1e-4,3e-4` and `seed=1:3` make six.

Commas separate values; a comma in quotes or brackets belongs to its value. `a:b` and `a:b:step` are whole
numbers, both ends included, as in `--profile 10:13`. Several sweeps make a grid, the last key changing fastest. The
name of a run and of its folder is NAME-KEY=VALUE-KEY=VALUE.
"""

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jdp.experiment.file import ExperimentError, check_for_devices, load, to_toml
from jdp.experiment.schema.experiment import Experiment
from jdp.run.folder import check_same

LONGEST_NAME = 160
"""Most characters of a run's name: file systems take 255 bytes, and names of files in it begin with it."""
MOST = 1000
"""Most runs in all: more are a typing mistake, as in seed=1:1000000000."""
_RANGE = re.compile(r"(-?\d{1,300}):(-?\d{1,300})(?::(-?\d{1,300}))?")


@dataclass(frozen=True)
class Member:
    """One run of a sweep.

    Attributes:
        base: name of the experiment, and of the sweep.
        name: of the run and its folder.
        values: swept key -> value, as text.
        experiment: validated, with these values and this name.
    """

    base: str
    name: str
    values: Mapping[str, str]
    experiment: Experiment


def members(file: Path, sweeps: Sequence[str], overrides: Mapping[str, str]) -> list[Member]:
    """Return the runs in order, each validated."""
    axes = dict(_axes(sweeps))
    for key in axes.keys() & overrides.keys():
        raise ExperimentError(f"--sweep {key} and --{key} {overrides[key]} exclude each other: remove one")
    runs: list[Member] = []
    for combination in itertools.product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        experiment = load(file, {**overrides, **values})
        name = member_name(experiment.name, values)
        runs.append(Member(experiment.name, name, values, experiment.model_copy(update={"name": name})))
    _check_different(runs)
    return runs


def check(sweep: Sequence[Member], runs: Path, *, processes: int = 1, devices: int | None = None) -> None:
    """Compare every run with the devices, and with what is in its folder."""
    for member in sweep:
        asked = member.experiment.devices
        count = asked * processes if asked is not None else devices
        try:
            if count is not None:
                check_for_devices(member.experiment, count)
            check_same(runs / member.name, to_toml(member.experiment))
        except ExperimentError as error:
            raise ExperimentError(f"{member.name}: {error}") from None


def member_name(name: str, values: Mapping[str, str]) -> str:
    """Return the name of a run and of its folder: "quick", {"seed": "1"} is "quick-seed=1".

    Characters that a folder's name cannot have are replaced; a short hash keeps different values apart.
    """

    def short_hash(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def word(value: str) -> str:
        safe = re.sub(r"[^A-Za-z0-9._-]+", "_", value)
        return safe if safe == value else f"{safe.strip('_')}.{short_hash(value)}"

    full = "-".join([name, *(f"{key}={word(value)}" for key, value in values.items())])
    return full if len(full) <= LONGEST_NAME else f"{full[: LONGEST_NAME - 9]}-{short_hash(full)}"


def _axes(sweeps: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the key and values of each sweep. Raises ExperimentError."""
    seen: set[str] = set()
    runs = 1
    for text in sweeps:
        key, equals, listed = (word.strip() for word in text.partition("="))
        key = key.removeprefix("--")
        items = _split(listed)
        ranges = [_range(key, item) for item in items]
        # Counted before a range becomes a list that does not fit into memory; `len` takes no range of 2**63 and more.
        runs *= sum(1 if r is None else (r.stop - r.start + r.step - 1) // r.step for r in ranges)
        if runs > MOST:
            raise ExperimentError(
                f"--sweep makes at most {MOST:,} runs in all; with {text} they are {runs:,}: give fewer"
            )
        values = [
            value for item, r in zip(items, ranges, strict=True) for value in ([item] if r is None else map(str, r))
        ]
        if not equals or not key or "" in values:
            raise ExperimentError(f"--sweep takes KEY=VALUE,VALUE,… or KEY=FIRST:LAST; given {text!r}: fix it")
        if key == "name":
            raise ExperimentError("--sweep takes any key but name: the sweep names its runs itself; sweep another")
        if key in seen:
            raise ExperimentError(f"--sweep {key} is given twice: write all of its values in one, with commas between")
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ExperimentError(f"--sweep {key} has the value {twice} twice: remove one")
        seen.add(key)
        yield key, values


def _split(text: str) -> list[str]:
    """Split at the commas outside of quotes and brackets."""
    items, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            items.append("")
        else:
            items[-1] += letter
    return [item.strip() for item in items]


def _range(key: str, item: str) -> range | None:
    """Return the numbers of "1:4" or "0:10:5", both ends included; None for anything else. Raises ExperimentError."""
    match = _RANGE.fullmatch(item)
    if match is None:
        return None
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    if step < 1 or last < first:
        raise ExperimentError(
            f"--sweep {key}: a range is FIRST:LAST or FIRST:LAST:STEP, from the smaller to the larger number, "
            f"both included; given {item}: swap its ends, or make the step 1 or more"
        )
    return range(first, last + 1, step)


def _check_different(runs: Sequence[Member]) -> None:
    """Raise ExperimentError for equal runs: 1e-4 and 0.0001 are the same value."""
    names: set[str] = set()
    meanings: dict[str, Mapping[str, str]] = {}
    for member in runs:
        meaning = to_toml(member.experiment.model_copy(update={"name": "any"}))
        first = meanings.setdefault(meaning, member.values)
        if first is not member.values:
            equal = [f"{key}={first[key]} and {key}={now}" for key, now in member.values.items() if first[key] != now]
            raise ExperimentError(f"--sweep gives the same run twice: {', '.join(equal)}; remove one")
        if member.name in names:
            raise ExperimentError(f"--sweep gives two runs the name {member.name}: choose another `name`")
        names.add(member.name)
