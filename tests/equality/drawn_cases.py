"""How `test_training_properties` draws: a case and the settings it is trained under, from one number."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

import numpy as np
from drawn_models import OPTIMIZERS, Case

OPTIONS = {
    "model": ("tree", "nnx"),
    "inputs": ("floats", "tokens"),
    "width": (8, 6, 7, 12),
    "layers": (1, 0, 2, 3, 4),
    "stacked": (False, True),
    "walk": ("once", "twice", "own", "tree"),
    "remat": (None, "full", "dots"),
    "tied": (False, True),
    "shared": (False, True),
    "state": (None, "norm", "masked_norm", "half_table", "plain_table", "calls", "layer_calls", "seen", "counted"),
    "inner": (None, "norm", "calls", "dropout", "one_rngs"),
    "noise": (None, "mask", "dropout", "held", "parents", "inside", "layer_fold", "layer_split"),
    "batch": ("flat", "nested"),
    "weights": ("ones", "uneven", "half", "counts"),
    "bad": (None, "infinite", "empty"),
    "loss": ("sum", "mean", "learned_weight"),
    "term": (None, "decay", "bare_decay", "negatives", "pairs"),
    "metrics": (None, "plain", "own"),
    "optimizer": tuple(OPTIMIZERS),
    "clip_norm": (None, 0.3),
    "frozen": (None, "same", "half", "integers"),
}
"""What a field may be, the simplest first."""

OFTEN = {"walk": 0.4, "state": 0.4, "inner": 0.3, "noise": 0.4, "bad": 0.2, "term": 0.15, "frozen": 0.3, "loss": 0.2}
"""How often a field is not its simplest; others are drawn evenly."""

MESHES = (
    *("data=1", "data=2", "data=3", "data=4", "data=5", "data=8"),
    *("replica=2 data=2", "replica=2 data=4", "data=2 model=2", "data=4 model=2"),
)
PLACES = tuple(itertools.product(("ddp", "zero1", "zero2", "zero3"), ("auto", "manual"), (1, 2, 4)))
MOST_ROWS = 64


@dataclass(frozen=True)
class Setting:
    """One way to train a case; `then`: saved after two steps, and gone on with under this (strategy, mesh)."""

    strategy: str = "ddp"
    partitioning: str | None = None
    accumulate: int = 1
    mesh: str = "data=2"
    then: tuple[str, str] | None = None

    @property
    def unit(self) -> int:
        """What the rows divide by."""
        meshes = [self.mesh, self.then[1]] if self.then else [self.mesh]
        return math.lcm(*(batch_shards(mesh) for mesh in meshes)) * self.accumulate


def axes(mesh):
    return {name: int(size) for name, size in (entry.split("=") for entry in mesh.split())}


def batch_shards(mesh):
    return math.prod(size for name, size in axes(mesh).items() if name != "model")


def draw(number):
    """Draw `number`: (case, its three settings). Three settings after another go through all of `PLACES`."""
    random = np.random.default_rng(number)
    settings = draw_settings(number, random)
    return draw_case(number, random, settings), settings


def draw_settings(number, random):
    order = np.random.default_rng(0).permutation(len(PLACES))
    places = [PLACES[order[(3 * number + i) % len(PLACES)]] for i in range(3)]
    again = 3 * number >= len(PLACES)  # every second time around, jdp picks the partitioning
    while True:
        settings = []
        for index, (strategy, partitioning, accumulate) in enumerate(places):
            picked = None if again and random.random() < 0.4 else partitioning
            then = None
            if index == number % 3:
                then = (str(random.choice(["ddp", "zero1", "zero2", "zero3"])), str(random.choice(MESHES)))
            settings.append(Setting(strategy, picked, accumulate, str(random.choice(MESHES)), then))
        if math.lcm(*(setting.unit for setting in settings)) <= MOST_ROWS:
            return tuple(settings)


def draw_case(number, random, settings):
    unit = math.lcm(*(setting.unit for setting in settings))
    fields = {name: pick(random, name, options) for name, options in OPTIONS.items()}
    rows = unit * int(random.integers(1, max(1, min(3, MOST_ROWS // unit)) + 1))
    return possible(Case(seed=number, rows=rows, **fields), settings)


def pick(random, name, options):
    if name in OFTEN and random.random() >= OFTEN[name]:
        return options[0]
    return options[random.integers(name in OFTEN, len(options))]


def possible(case, settings):
    """The case with what cannot be had, or has no one right answer, taken out."""
    change = {}
    if case.inner or case.state or case.noise in ("held", "parents"):
        change["model"] = "nnx"
    if not case.layers:
        change |= {"stacked": False, "inner": None, "remat": None, "walk": "once"}
    if case.noise in ("parents", "inside", "layer_fold", "layer_split"):
        change |= ({} if case.noise == "parents" else {"walk": "once"}) if case.layers else {"noise": None}
    if case.inner == "one_rngs" and case.stacked:  # stacked layers have streams of their own
        change["inner"] = "dropout"
    if case.state == "layer_calls" and not case.layers:
        change["state"] = "calls"
    if case.walk == "own" and case.stacked:
        change["walk"] = "twice"
    if case.frozen == "integers" and (case.model == "nnx" or change.get("model") == "nnx"):
        change["frozen"] = "same"
    if case.bad == "infinite" and case.inputs == "tokens":
        change["bad"] = "empty"
    if case.loss == "mean":
        change["metrics"] = None
    if case.term == "pairs" and any(case.rows // setting.accumulate % 2 for setting in settings):
        change["term"] = None
    case = dataclasses.replace(case, **change)
    split = any(setting.accumulate > 1 for setting in settings)
    if case.keeps and case.draws and split:  # the masks of a microbatch are the rows of masks that are never drawn
        inner = None if case.inner in ("dropout", "one_rngs") else case.inner
        case = dataclasses.replace(case, noise=None, inner=inner)
    return case


def may_be_refused(case, setting):
    """Whether the case holds what cannot be right where the loss is called on parts of a batch."""
    if setting.unit == 1 or (setting.accumulate == 1 and setting.partitioning != "manual"):
        return False
    if case.loss == "mean" and setting.accumulate > 1:
        return True
    return case.term in ("bare_decay", "negatives", "pairs") or case.state == "counted"
