"""Detects bad steps, and ends a run that cannot continue. All processes decide the same at the same step.

1. `after` reads the metrics of an earlier step, because reading waits for the step. The first skipped step of a row is
   inspected, and its batch is written to the run's folder. Too many skipped steps in a row end the run.
2. Replicas are compared every `guard.check_replicas_every` steps and before each save. If a device's bits differ, the
   run ends, and names its host: since the fault its gradients were summed with all others', so overwriting the copy
   does not give the right state. A run that restarts without that host gets the same bits as without the fault.
3. Process 0 reports the host for which the others wait.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jdp.core.cluster.barrier import from_every_process
from jdp.core.cluster.initialize import is_lost_peer
from jdp.core.state import TrainState
from jdp.core.types import Batch, Device
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError
from jdp.guard.deadline import capital
from jdp.guard.nonfinite import save_batch
from jdp.guard.replicas import CorruptState, Difference, Fingerprints, fingerprints, in_words
from jdp.guard.stragglers import HostTimes
from jdp.guard.watch import Watch
from jdp.launch.events import EventLog
from jdp.run.progress import Progress

AHEAD = 2
"""Steps that may be queued on the devices before the loop waits."""
_LARGEST_NORM = float(np.sqrt(np.finfo(np.float32).max))
"""A gradient with a larger norm is skipped unless it is clipped, because its square is infinite."""
INSPECTED = 3
"""Largest number of skipped steps per visit to inspect, and of batches to keep."""
COMPARED_EVERY = 20
"""Steps between comparisons of the hosts' lateness."""
MOST_SKIPPED = 10
"""Skipped steps in a row after which a run ends."""
_SCHEDULER_NAMES = ("SLURMD_NODENAME", "JDP_NODE_NAME")
"""Variables with the scheduler's name for this host; experiments/cluster/jobset.yaml sets the second."""


class Diverged(ExperimentError):
    """The gradients are no longer finite, on all processes alike."""


@dataclass(frozen=True)
class Queued:
    """A step whose metrics are not yet read."""

    step: int
    values: Any
    batch: Batch | None


class Health:
    def __init__(self, assembly: Assembly, progress: Progress, watch: Watch, say: Callable[[str], None]) -> None:
        self._assembly, self._progress, self._watch, self._say = assembly, progress, watch, say
        self._inspected = 0
        self._hosts = HostTimes(COMPARED_EVERY)
        self._queued: list[Queued] = []
        self._compared: list[tuple[int, Fingerprints]] = []
        self._values: Any = None

    def before(self) -> None:
        """Record when this process dispatches the next step."""
        self._hosts.dispatches(self._values)

    def taken(self, batch: Batch, values: Any, step: int) -> None:
        self._values = values
        kept = {name: values[name] for name in ("skipped", "loss", "weight", "grad_norm")}
        self._queued.append(Queued(step, kept, batch if self._inspected < INSPECTED else None))

    def after(self, state: TrainState, step: int) -> None:
        """Read the metrics of the step `AHEAD` steps ago, and compare replicas if due."""
        every = self._assembly.experiment.guard.check_replicas_every
        if every and step % every == 0:
            self._compare(state, step)
        self._check_until(step - AHEAD, state)
        if line := self._hosts.after(step):
            self._watch.log.event("late", step=step, words=f"{capital(line)}.")
            self._say(line)
        self._hosts.results()

    def row(self, values: Any) -> dict[str, float]:
        """Wait for a step's metrics; return the hosts' columns of a row (empty with a single host)."""
        jax.block_until_ready(values)
        self._hosts.results()
        found = self._hosts.found
        return {} if found is None else {"late_process": found.process, "late_seconds": found.seconds}

    def restart(self) -> None:
        """Exclude work between steps, such as an evaluation, from the hosts' times."""
        self._hosts.restart()

    def check_all(self, state: TrainState, *, ended: bool = False) -> None:
        """Read the metrics of all queued steps, and compare replicas: before a save, and at the end.

        No run, however short, may end with two skipped steps in a row, or with all steps after the first skipped: the
        first update may have broken the weights.
        """
        progress = self._progress
        if self._assembly.experiment.guard.check_replicas_every:
            self._compare(state, progress.done)
        last = self._check_until(progress.done, state)
        progress.skipped = skipped = progress.skips_seen
        streak = progress.skips_in_a_row
        if ended and last and streak and (streak > 1 or skipped >= progress.done - 1):
            raise Diverged(_why_skipped(streak, last.values, from_the_first=skipped == progress.done, last=True))

    def _compare(self, state: TrainState, step: int) -> None:
        with self._watch.during("comparing replicas"):  # the first one compiles
            if (taken := fingerprints(state)) is not None:
                self._compared.append((step, taken))

    def _check_until(self, step: int, state: TrainState) -> Queued | None:
        """Check the metrics and the replicas of the steps until `step`; return the last of them."""
        last: Queued | None = None
        while self._queued and self._queued[0].step <= step:
            last = self._queued.pop(0)
            self._check(last, state)
        while self._compared and self._compared[0][0] <= step:
            compared, taken = self._compared.pop(0)
            check_devices(taken.differences(), compared, self._watch.log)
        return last

    def _check(self, queued: Queued, state: TrainState) -> None:
        """Read the metrics of a step. Raises Diverged after too many skipped steps in a row."""
        progress, values = self._progress, queued.values
        skipped = int(values["skipped"])
        was_skipped, progress.skips_seen = skipped > progress.skips_seen, skipped
        progress.skips_in_a_row = progress.skips_in_a_row + 1 if was_skipped else 0
        if progress.skips_in_a_row == 1:
            self._report(queued, state)
        if progress.skips_in_a_row >= MOST_SKIPPED:
            raise Diverged(_why_skipped(progress.skips_in_a_row, values, from_the_first=skipped == queued.step))

    def _report(self, queued: Queued, state: TrainState) -> None:
        """Report the first skipped step of a row, keep its batch, and find the bad part of its gradient."""
        sentences = [f"Step {queued.step} is skipped: its gradient or update was not finite."]
        if queued.batch is not None:
            self._inspected += 1
            sentences += self._found(state, queued.batch, queued.step)
            try:
                file = save_batch(self._watch.log.file.parent, queued.step, queued.batch)
                sentences.append(f"Its batch is in {file}.")
            except OSError as error:
                sentences.append(f"Its batch cannot be written: {error.strerror}.")
        self._watch.log.event("bad step", step=queued.step, words=" ".join(sentences))
        for sentence in sentences:
            self._say(sentence)

    def _found(self, state: TrainState, batch: Batch, step: int) -> list[str]:
        """Return the findings of an inspection, or why it failed: it needs as much memory as a step."""
        try:
            with self._watch.during("inspecting a bad step"):
                return self._assembly.training.inspection.of(state, batch, step).sentences
        except jax.errors.JaxRuntimeError as error:
            if is_lost_peer(error):
                raise
            return [f"It cannot be inspected: {error}."]


def _why_skipped(steps: int, values: Any, *, from_the_first: bool, last: bool = False) -> str:
    """Return the error of `steps` skipped steps in a row: the `last` of a run, or as many as the limit allows."""
    which = "and the run ended with them" if last else f"a run ends after {MOST_SKIPPED}"
    names = ("loss", "weight", "grad_norm")
    loss, weight, norm = (float(value) for value in jax.device_get([values[name] for name in names]))
    if weight == 0:
        return (
            f"a step's examples must have weights; those of the last of {steps} step{'s in a row' * (steps > 1)} that "
            f"changed nothing ({which}) sum to 0: look at the data's weights, masks and padding"
        )
    row = f"{steps} step{'s in a row' * (steps > 1)} were not finite ({which}), loss {loss:.4g}"
    if math.isfinite(loss) and norm < _LARGEST_NORM:
        return f"the gradients were finite, and the updates of {row}: lower optimizer.lr; checkpoints stay as they are"
    problem = f"the gradients of {row}"
    if from_the_first:
        return (
            f"{problem}: from the first step on, before any update, so it is not the learning rate. Look for NaN, "
            'infinity or huge numbers in the data, at weights from train.init_from, or try precision = "fp32"; no '
            "weights were changed"
        )
    return f"{problem}: lower optimizer.lr, set optimizer.clip_norm, or look at the data; checkpoints stay as they are"


class WrongDevice(CorruptState):
    """A device's bits differ from those of its replicas: a restart alone does not help."""

    exit_code = 78


def check_devices(differences: Sequence[Difference], step: int, log: EventLog) -> None:
    """Raise WrongDevice if copies of the state after a step differ. All processes call it with the same differences."""
    if not differences:
        return
    host = next(filter(None, map(os.environ.get, _SCHEDULER_NAMES)), socket.gethostname())
    hosts = from_every_process("the host of a device that differs", host)
    devices = tuple(dict.fromkeys(device for each in differences for device in each.devices))
    where = dict.fromkeys(hosts[device.process_index] for device in devices)
    why = f"after step {step} {in_words(differences)}, on host {', '.join(where)}"
    log.event("corrupt", step=step, words=f"{capital(why)}.")
    if differences[0].agreeing:
        advice = leave_out(devices[0], hosts)
    else:
        advice = "No majority shows which device is wrong: test both (`jdp doctor`), and leave out the faulty host"
    raise WrongDevice(
        f"All copies of the state must be equal bit for bit; given {why}. Nothing of it was saved. {advice}. Then run "
        "again: it resumes from the previous checkpoint.",
        differences,
    )


def leave_out(device: Device, hosts: Sequence[str]) -> str:
    """Return how to run without a device's host; `hosts` has each process' host."""
    host = hosts[device.process_index]
    if len(set(hosts)) > 1:
        ways = f"Slurm: sbatch --exclude={host} JOB.sh; Kubernetes: kubectl cordon {host}; else start without it"
        return f"Leave host {host} out ({ways})"
    there = [each.id for each in jax.devices(device.platform) if hosts[each.process_index] == host]
    number = there.index(device.id)
    return f"It is device {number} of the only host, {host}: run on another, or without it (CUDA_VISIBLE_DEVICES)"
