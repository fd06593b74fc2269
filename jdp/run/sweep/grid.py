"""The runs of a sweep: `optimizer.lr=1e-4,3e-4` and `seed=1:3` make six.

A list has commas between; one that stands in quotes or brackets belongs to its value. `a:b` and `a:b:step` are whole
numbers, both ends included, as in `--profile 10:13`. Several sweeps make a grid, the last key changing fastest. A run
is NAME-KEY=VALUE-KEY=VALUE: its name says what is special about it, and finds its folder again.
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
"""Characters of a run's name; file systems take 255 bytes, and others put something behind it."""
MOST = 1000
"""Runs in all; more are a slip of the pen, as in seed=1:1000000000."""
_RANGE = re.compile(r"(-?\d{1,300}):(-?\d{1,300})(?::(-?\d{1,300}))?")
_NAMED_BY_FLAGS = {"name": "the sweep names its runs itself"}


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
    """The runs, in order, each validated.

    Args:
        file: the experiment.
        sweeps: "KEY=VALUES" each.
        overrides: dotted key -> text, the same for all runs.

    Raises:
        ExperimentError: a sweep is not understood, a key is unknown, a value does not fit its key, two runs would
            be the same, or there are more than `MOST`.
    """
    axes = dict(_axes(sweeps))
    for key in axes.keys() & overrides.keys():
        raise ExperimentError(f"--sweep {key} and --{key} {overrides[key]} exclude each other: remove one")
    found: list[Member] = []
    for combination in itertools.product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        experiment = load(file, {**overrides, **values})
        name = member_name(experiment.name, values)
        found.append(Member(experiment.name, name, values, experiment.model_copy(update={"name": name})))
    _check_different(found)
    return found


def check(found: Sequence[Member], runs: Path, *, processes: int = 1, devices: int | None = None) -> None:
    """Hold every run against the devices, and against the folder it will have.

    Args:
        found: the runs.
        runs: the folder that holds them.
        processes: how many a run is made of.
        devices: how many all of them have, for a run that does not ask for `devices`; None: not known.

    Raises:
        ExperimentError: the first thing wrong, before anything runs.
    """
    for member in found:
        asked = member.experiment.devices
        count = asked * processes if asked is not None else devices
        try:
            if count is not None:
                check_for_devices(member.experiment, count)
            check_same(member.experiment, runs / member.name)
        except ExperimentError as error:
            raise ExperimentError(f"{member.name}: {error}") from None


def member_name(name: str, values: Mapping[str, str]) -> str:
    """ "quick", {"seed": "1"} -> "quick-seed=1". What a folder's name cannot hold is replaced, and a short hash of the
    value keeps the names of different values different."""
    whole = "-".join([name, *(f"{key}={_word(value)}" for key, value in values.items())])
    return whole if len(whole) <= LONGEST_NAME else f"{whole[: LONGEST_NAME - 9]}-{_hash(whole)}"


def _word(value: str) -> str:
    word = re.sub(r"[^A-Za-z0-9._-]+", "_", value)
    return word if word == value else f"{word.strip('_')}.{_hash(value)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _axes(sweeps: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Key and values of each sweep. Raises ExperimentError."""
    seen: set[str] = set()
    runs = 1
    for text in sweeps:
        key, equals, listed = (part.strip() for part in text.partition("="))
        key = key.removeprefix("--")
        items = _split(listed)
        runs *= sum(_count(key, item) for item in items)  # before a range becomes a list that no memory holds
        if runs > MOST:
            raise ExperimentError(
                f"--sweep makes at most {MOST:,} runs in all; with {text} they are {runs:,}: give fewer"
            )
        values = [value for item in items for value in _expanded(key, item)]
        if not equals or not key or "" in values:
            raise ExperimentError(f"--sweep takes KEY=VALUE,VALUE,… or KEY=FIRST:LAST; got {text!r}")
        if key in _NAMED_BY_FLAGS:
            raise ExperimentError(f"--sweep {key} is not possible: {_NAMED_BY_FLAGS[key]}")
        if key in seen:
            raise ExperimentError(f"--sweep {key} is given twice: write all of its values in one, with commas between")
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ExperimentError(f"--sweep {key} has the value {twice} twice")
        seen.add(key)
        yield key, values


def _split(text: str) -> list[str]:
    """Part at the commas that stand outside of quotes and brackets."""
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


def _expanded(key: str, item: str) -> list[str]:
    """ "1:4" -> 1, 2, 3, 4; "0:10:5" -> 0, 5, 10; anything else is itself."""
    bounds = _bounds(key, item)
    if bounds is None:
        return [item]
    first, last, step = bounds
    return [str(number) for number in range(first, last + 1, step)]


def _count(key: str, item: str) -> int:
    """How many values `_expanded` gives. (Python's `len` takes no range of 2**63 and more.)"""
    bounds = _bounds(key, item)
    return 1 if bounds is None else (bounds[1] - bounds[0]) // bounds[2] + 1


def _bounds(key: str, item: str) -> tuple[int, int, int] | None:
    """First, last and step of a range; None for anything else."""
    found = _RANGE.fullmatch(item)
    if found is None:
        return None
    first, last, step = int(found[1]), int(found[2]), int(found[3] or 1)
    if step < 1 or last < first:
        raise ExperimentError(
            f"--sweep {key}: a range is FIRST:LAST or FIRST:LAST:STEP, from the smaller to the larger number, "
            f"both included; got {item}"
        )
    return first, last, step


def _check_different(found: Sequence[Member]) -> None:
    """Values that are written differently may mean the same: 1e-4 and 0.0001."""
    names: set[str] = set()
    meanings: dict[str, Mapping[str, str]] = {}
    for member in found:
        meaning = to_toml(member.experiment.model_copy(update={"name": "any"}))
        first = meanings.setdefault(meaning, member.values)
        if first is not member.values:
            parts = [f"{key}={first[key]} and {key}={now}" for key, now in member.values.items() if first[key] != now]
            raise ExperimentError(f"--sweep gives the same run twice: {', '.join(parts)}")
        if member.name in names:
            raise ExperimentError(f"--sweep gives two runs the name {member.name}: choose another `name`")
        names.add(member.name)
