"""Foresee which share of its time a run trains when devices fail (its goodput), and how often it should save.

The model, all times in seconds:

- N devices fail independently, each once in its mean time between failures (MTBF) on average, whatever its age; any
  failure stops all. So the run fails once in M = MTBF / N, and times between failures are exponential.
- After a failure it takes R to train again: notice, start, read the last checkpoint, compile. A failure in that time
  begins it anew.
- Every τ of training a checkpoint is made. It stalls training for d, while arrays are copied to the host's memory, and
  counts once it is written, b after the stall; the next copy waits until then. A synchronous save has b = 0 and its
  whole time in d.

A cycle takes L = max(τ, b) + d, and checkpoint k counts if the run lives until k L + min(τ, b). By renewal and reward,

    goodput = τ E[checkpoints that count between two failures] / E[time between two failures]
            = τ e^(−min(τ, b)/M) / (M e^(R/M) (e^(L/M) − 1)),

which for b = 0 is the wall-clock time of Daly 2006. The τ that maximises it does not depend on b: it is Young's
√(2 d M) at first order, and Daly's higher-order formula.

Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17,
1974. J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
Computer Systems 22, 2006. A simulation of every failure and save agrees (`tests/foresight/test_foreseen_goodput.py`).
What real machines do besides (failures that come in bursts, or that take hosts out of the run for good) is not in the
model.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from jdp.base.formatting import align_columns, format_bytes, format_percent, format_span
from jdp.core.cluster.initialize import LOST_HOST_SECONDS

WRITE_BYTES_PER_SECOND = 2**30
"""Of a host, into storage that all share: what is assumed where the time of a save is not given."""
COPY_BYTES_PER_SECOND = 16 * 2**30
"""Of a device into its host's memory: what is assumed where the stall of a save is not given. Half of what one H100 by
itself gave `Checkpoints.save`, whose first save of a process is slower (the log has the numbers)."""
START_SECONDS = 150.0
"""To schedule, start and compile again: what is assumed where the time of a restart is not given."""
HEADINGS = ("saves", "stall", "written after", "every", "steps", "goodput", "saving", "lost", "restarting")
_SHARES = ("training", "saving", "lost", "restarting")


def young(stall: float, mtbf: float) -> float:
    """Return the seconds of training between two checkpoints that lose least, at first order: √(2 d M), Young 1974."""
    return math.sqrt(2 * stall * mtbf)


def daly(stall: float, mtbf: float) -> float:
    """Return the seconds of training between two checkpoints that lose least, at higher order (Daly 2006).

    √(2 d M) (1 + √(d / 2M) / 3 + (d / 2M) / 9) − d if d < 2 M, else M.
    """
    if stall >= 2 * mtbf:
        return mtbf
    ratio = stall / (2 * mtbf)
    return math.sqrt(2 * stall * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


@dataclass(frozen=True)
class Failures:
    """How often a run fails, and what saving and restarting take, in seconds."""

    mtbf: float  # mean time between failures of the whole run: a device's over the number of devices
    stall: float  # for which a save stops training
    save: float  # from the beginning of a save until its checkpoint counts; `stall` or more
    restart: float  # from a failure until training goes on

    @property
    def background(self) -> float:
        """Seconds for which a checkpoint is written while training goes on."""
        return max(0.0, self.save - self.stall)

    @property
    def best_interval(self) -> float:
        """Seconds of training between two checkpoints: Daly's, and at least what writing one takes."""
        return max(daly(self.stall, self.mtbf), self.background)

    def goodput(self, interval: float) -> float:
        """Return the expected share of time that trains and is kept (the formula in this module's docstring)."""
        cycle = (max(interval, self.background) + self.stall) / self.mtbf
        if cycle > 700:  # e^700 is the largest that a float holds
            return 0.0
        kept = math.exp(-(min(interval, self.background) + self.restart) / self.mtbf)
        return kept * interval / (self.mtbf * math.expm1(cycle)) if cycle else kept

    def shares(self, interval: float) -> dict[str, float]:
        """Return what the time goes to, as shares of 1: "training", "saving", "lost" and "restarting"."""
        training, restarting = self.goodput(interval), -math.expm1(-self.restart / self.mtbf)
        saving = training * (self.stall + max(0.0, self.background - interval)) / interval if interval else 0.0
        lost = max(0.0, 1 - training - saving - restarting)
        return {"training": training, "saving": saving, "lost": lost, "restarting": restarting}


@dataclass(frozen=True)
class Saves:
    """One way to save, and what it comes to."""

    name: str  # "asynchronous", or what else tells it from the others
    failures: Failures  # with its stall and its time
    interval: float  # seconds of training between two checkpoints
    steps: int | None  # the same in steps; None where the time of a step is not known

    @property
    def goodput(self) -> float:
        """The share of time that trains and is kept."""
        return self.failures.goodput(self.interval)

    def row(self) -> tuple[str, ...]:
        """Return the row under `HEADINGS`."""
        shares = self.failures.shares(self.interval)
        times = map(format_span, (self.failures.stall, self.failures.save, self.interval))
        steps = "?" if self.steps is None else f"{self.steps:,}"
        return (self.name, *times, steps, *(f"{100 * shares[name]:.2f} %" for name in _SHARES))

    def to_json(self) -> dict[str, Any]:
        """Return it as `jdp plan --json` prints it; all times in seconds."""
        return {
            "name": self.name,
            **dataclasses.asdict(self.failures),
            "interval": self.interval,
            "steps": self.steps,
            **self.failures.shares(self.interval),
        }


@dataclass(frozen=True)
class Goodput:
    """Which share of its time a run is expected to train, and how often it should save."""

    device_mtbf: float  # a device's mean seconds between failures
    devices: int  # how many there are
    ways: tuple[Saves, ...]  # ways to save: asynchronously, as `jdp train` does, with the interval to take, comes first
    notes: tuple[str, ...]  # what was assumed

    @property
    def title(self) -> str:
        """A sentence for above the table."""
        every = format_span(self.device_mtbf / self.devices)
        return f"Goodput: a device fails once in {format_span(self.device_mtbf)}, one of {self.devices:,} in {every}"

    @property
    def why(self) -> tuple[str, ...]:
        """Sentences: the interval, by which formula, and what it gives."""
        best = self.ways[0]
        stall, mtbf = best.failures.stall, best.failures.mtbf
        formulas = f"Young's formula gives {format_span(young(stall, mtbf))}, Daly's {format_span(daly(stall, mtbf))}"
        least = best.failures.background > daly(stall, mtbf)
        limit = f"; writing takes {format_span(best.failures.background)}, which is the least" if least else ""
        key = "" if best.steps is None else f" (train.checkpoint_every = {best.steps})"
        return (
            f"Save every {format_span(best.interval)}{key}: {format_percent(best.goodput)} of the time is expected to "
            f"train. {formulas}{limit}.",
        )

    def table(self) -> list[tuple[str, ...]]:
        """Return a row for each way to save, under `HEADINGS`."""
        return [way.row() for way in self.ways]

    def to_json(self) -> dict[str, Any]:
        """Return the `goodput` that `jdp plan --json` prints; all times in seconds."""
        best = self.ways[0]
        stall, mtbf = best.failures.stall, best.failures.mtbf
        return {
            "goodput": best.goodput,
            "device_mtbf": self.device_mtbf,
            "mtbf": mtbf,
            "interval": best.interval,
            "checkpoint_every": best.steps,
            "young": young(stall, mtbf),
            "daly": daly(stall, mtbf),
            "ways": [way.to_json() for way in self.ways],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        notes = [f"Note: {note}" for note in self.notes]
        return "\n".join([self.title, *align_columns([HEADINGS, *self.table()]), *self.why, *notes])


def foresee_goodput(
    device_mtbf: float,
    *,
    devices: int,
    hosts: int,
    state_bytes: int,
    step_seconds: float | None = None,
    stall: float | None = None,
    save: float | None = None,
    restart: float | None = None,
    checkpoint_every: int | None = None,
) -> Goodput:
    """Return which share of its time a run is expected to train, and the best interval between checkpoints.

    What is not given is assumed, and noted. A save copies each host's share of the state off the devices at
    `COPY_BYTES_PER_SECOND`, and writes it at `WRITE_BYTES_PER_SECOND`. A restart takes the time until a lost host
    is noticed, `START_SECONDS`, and as long to read as to write.
    """
    notes: list[str] = []
    if save is None:
        save = max(state_bytes / hosts / WRITE_BYTES_PER_SECOND, stall or 0.0)
        speed = format_bytes(WRITE_BYTES_PER_SECOND)
        notes.append(f"a save takes {format_span(save)}: {format_bytes(state_bytes)} at {speed} a second and host")
    if stall is None:
        stall = min(save, state_bytes / devices / COPY_BYTES_PER_SECOND)
        speed = format_bytes(COPY_BYTES_PER_SECOND)
        notes.append(f"an asynchronous save stalls {format_span(stall)}: copied at {speed} a second and device")
    if restart is None:
        restart = LOST_HOST_SECONDS + START_SECONDS + save
        notes.append(
            f"a restart takes {format_span(restart)}: {LOST_HOST_SECONDS} s until a lost host is noticed, "
            f"{START_SECONDS:.0f} s to start and compile, and as long to read as to write"
        )
    failures = Failures(device_mtbf / devices, min(stall, save), save, restart)
    blocking = dataclasses.replace(failures, stall=save)
    ways = [_best("asynchronous", failures, step_seconds), _best("synchronous", blocking, step_seconds)]
    if checkpoint_every is not None and step_seconds is not None:
        ways.append(Saves("as in the file", failures, checkpoint_every * step_seconds, checkpoint_every))
    if notes:
        notes = ["assumed: " + "; ".join(notes)]
    return Goodput(device_mtbf, devices, tuple(ways), tuple(notes))


def _best(name: str, failures: Failures, step_seconds: float | None) -> Saves:
    """Return a way to save with its best interval, in whole steps where the time of a step is known."""
    interval = failures.best_interval
    if not step_seconds:
        return Saves(name, failures, interval, None)
    steps = max(1, round(interval / step_seconds), math.ceil(failures.background / step_seconds))
    return Saves(name, failures, steps * step_seconds, steps)
