"""Which runs a proof makes: settings, what prevents one, and the covering list.

A fault of a data-parallel step shows in a combination of two choices, such as a strategy and a partitioning, or a
strategy and a number of devices. So the default list has every such *pair* at least once: a pairwise covering array
(Kuhn, Wallace and Gallo 2004, doi:10.1109/TSE.2004.24). It has about as many programs as the two longest lists
multiply to. `full` runs every combination. `quick` runs one pair of settings: the user's own, resumed under the one
that differs most.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import Mesh

from jdp.base.words import Partitioning, StrategyName
from jdp.core.plan import Plan
from jdp.core.sharding.axes import DATA, batch_unit
from jdp.core.sharding.mesh import make_mesh
from jdp.core.sharding.strategy import STRATEGIES
from jdp.core.types import Device


@dataclass(frozen=True)
class Setting:
    """How one run is done; none of these choices may change what is learnt.

        >>> print(jdp.prove.Setting("zero3", "manual", devices=8, accumulate=2))
        zero3 manual 8 devices K=2

    Attributes:
        strategy: "ddp", "zero1", "zero2" or "zero3".
        partitioning: "auto" or "manual".
        devices: number of devices.
        accumulate: microbatches a step, K.
    """

    strategy: StrategyName = "ddp"
    partitioning: Partitioning = "auto"
    devices: int = 1
    accumulate: int = 1

    def __str__(self) -> str:
        return f"{self.strategy} {self.partitioning} {format_devices(self.devices)} K={self.accumulate}"

    @property
    def choices(self) -> tuple[object, ...]:
        """The four choices, in the order of the fields."""
        return (self.strategy, self.partitioning, self.devices, self.accumulate)

    @property
    def changes(self) -> int:
        """How many of its choices differ from `ddp auto` on one device without microbatches."""
        return sum(own != plain for own, plain in zip(self.choices, Setting().choices, strict=True))


@dataclass(frozen=True)
class Skip:
    """A run, or a group of runs, that is left out.

    Attributes:
        name: a part of their names, such as "manual" or "8 devices K=2".
        reason: why.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class Space:
    """All settings that could be run."""

    devices: Sequence[Device]  # those of this machine that the proof uses, in order
    counts: tuple[int, ...]  # numbers of devices, ascending; 1 is among them
    accumulates: tuple[int, ...]  # numbers of microbatches, ascending; 1 is among them
    axes: Mapping[str, int]  # mesh axis -> size, as in an experiment file; `data` takes what the others leave
    rows: int = 0  # of the global batch
    no_manual: str | None = None  # why manual partitioning is not run; None: it is
    no_microbatches: str | None = None  # why a batch may not be computed in microbatches; None: it may

    def mesh(self, count: int) -> Mesh:
        """Return the mesh of these axes over `count` devices; over one device, each axis has size 1."""
        axes = {name: 1 if count == 1 else -1 if name == DATA else size for name, size in self.axes.items()}
        return make_mesh(devices=self.devices[:count], **axes)

    def every(self) -> Iterator[Setting]:
        """Yield all combinations, device counts from the largest down."""
        kinds = ("auto", "manual")
        for count, strategy, kind, k in itertools.product(self.counts[::-1], STRATEGIES, kinds, self.accumulates):
            yield Setting(strategy, kind, count, k)

    def obstacle(self, setting: Setting) -> Skip | None:
        """Return what prevents `setting` from being run, as wide a group as the reason holds for, or None."""
        if setting.partitioning == "manual" and self.no_manual:
            return Skip("manual", self.no_manual)
        if setting.accumulate > 1 and self.no_microbatches:
            return Skip(f"K={setting.accumulate}", self.no_microbatches)
        try:
            mesh = Plan(self.mesh(setting.devices)).mesh
        except ValueError as error:
            return Skip(format_devices(setting.devices), str(error))
        try:
            batch_unit(mesh.shape, setting.accumulate).check(self.rows)
        except ValueError as error:
            return Skip(f"{format_devices(setting.devices)} K={setting.accumulate}", str(error))
        return None


@dataclass(frozen=True)
class Resume:
    """A run that is saved after step `at` of one setting and resumed under another, or the same."""

    at: int
    first: Setting
    second: Setting

    def __str__(self) -> str:
        onto = f"onto {self.second}" if self.second != self.first else "onto the same"
        return f"resume after step {self.at}: {self.first}, {onto}"


RunSpec = Setting | Resume
"""One run of a proof."""


def causal_order(run: RunSpec) -> tuple[int, ...]:
    """Return a key that sorts differing runs by possible cause.

    A setting may have the faults of those with fewer of its choices, and a resumed run those of its settings.
    """
    if isinstance(run, Resume):
        return 1, run.first.changes + run.second.changes, run.second.devices
    return 0, run.changes, run.devices, run.accumulate


def common_choice(differing: Sequence[Setting], equal: Sequence[Setting]) -> str:
    """Return the choice that all `differing` settings share and none of `equal`, in words; empty if there is none."""
    if len(differing) < 2 or not equal:
        return ""
    names = ("strategy {}", "partitioning {}", "{} devices", "K={}")
    columns = (zip(*(s.choices for s in settings), strict=True) for settings in (differing, equal))
    for name, shared, others in zip(names, *columns, strict=True):
        if len({*shared}) == 1 and shared[0] not in others:
            return name.format(shared[0])
    return ""


def format_devices(devices: int) -> str:
    """Return "1 device", "4 devices"."""
    return f"{devices} device{'s' if devices > 1 else ''}"


def choose_runs(
    space: Space, own: Setting, *, steps: int, full: bool, only: Sequence[str], quick: bool = False
) -> tuple[list[RunSpec], list[Skip]]:
    """Return the runs of a proof in their order, and what is left out because it cannot be run."""
    obstacles = {setting: space.obstacle(setting) for setting in space.every()}
    possible = [setting for setting, obstacle in obstacles.items() if obstacle is None]
    listed = _runs(possible if full else _covering(possible, own), own, steps)
    wanted = [text for text in only if not _named(text, listed)]
    every = _runs(possible, own, steps)
    unknown = [text for text in wanted if not _named(text, [*every, *obstacles])]
    if unknown:
        names = "; ".join(map(str, listed))
        raise ValueError(
            f"`only` keeps runs by a part of their names; given {', '.join(unknown)}, in none of: {names}. Name a "
            "part of one of these."
        )
    runs = [run for run in listed if not only or any(text in str(run) for text in only)]
    runs += [run for text in wanted for run in _named(text, every) if run not in runs]
    named = (skip for setting, skip in obstacles.items() if not only or any(text in str(setting) for text in only))
    skips = list(dict.fromkeys(skip for skip in named if skip is not None))
    if quick:
        kept = _quick(possible, own, steps)
        why = f"the {len(runs)} runs that have every pair of choices; jdp prove without --quick makes them"
        runs, skips = kept, [*skips, Skip("--quick", why)]
    if steps < 2:
        skips.append(Skip("resume", "saving in the middle takes at least 2 steps"))
    if not runs or (not only and not any(setting.devices > 1 for setting in possible)):
        raise ValueError("There is nothing to run: " + "; ".join(f"{skip.name}: {skip.reason}" for skip in skips) + ".")
    return list(dict.fromkeys(runs)), skips


def _named(text: str, runs: Sequence[RunSpec]) -> list[RunSpec]:
    return [run for run in runs if text in str(run)]


def _covering(possible: list[Setting], own: Setting) -> list[Setting]:
    """Return settings with every pair of choices that `possible` has, chosen greedily, and one device with each K."""
    alone = [s for s in possible if s.devices == 1 and (s.strategy, s.partitioning) == ("ddp", "auto")]
    many = [s for s in possible if s.devices > 1]
    many.sort(key=lambda setting: setting != own)  # stable: the user's own comes first
    missing = {pair for setting in many for pair in _pairs(setting)}
    chosen: list[Setting] = []
    while missing:
        best = own if not chosen and own in many else max(many, key=lambda s: len(_pairs(s) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return [*alone[:1], *chosen, *alone[1:]]


def _pairs(setting: Setting) -> set[tuple[tuple[int, object], ...]]:
    return set(itertools.combinations(enumerate(setting.choices), 2))


def _quick(possible: list[Setting], own: Setting, steps: int) -> list[RunSpec]:
    """Return one run: the user's own setting but for the last step, which is done under the one that differs most.

    Of several that differ as much it is the highest stage.
    """
    many = [setting for setting in possible if setting.devices > 1]
    if not many:
        return []
    first = own if own in many else max(many, key=lambda setting: setting.devices)
    stages = list(STRATEGIES)
    other = max(many, key=lambda s: (_differences(s, first), stages.index(s.strategy), s.devices))
    return [Resume(steps - 1, first, other) if steps > 1 else first]


def _differences(one: Setting, other: Setting) -> int:
    return sum(a != b for a, b in zip(one.choices, other.choices, strict=True))


def _runs(settings: list[Setting], own: Setting, steps: int) -> list[RunSpec]:
    """Return the settings, and two resumed runs: of the user's own, and from that onto the one that differs most."""
    if steps < 2 or not settings:
        return [*settings]
    first = own if own in settings else max(settings, key=lambda s: s.devices)
    other = max(settings, key=lambda s: (_differences(s, first), s.devices))
    return [*settings, *dict.fromkeys((Resume(steps // 2, first, first), Resume(steps // 2, first, other)))]
