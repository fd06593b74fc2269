"""A device whose copy of the state differs from the others': the run goes back, once for each device.

The wrong copy may be older than the step after which it was found. Since then its gradients were summed with all
others', so overwriting the copy (`guard.heal_replicas`) does not give the right state. The run goes back to the newest
checkpoint from before the last comparison that found all copies equal, and takes the same steps again: the bits are
those of a run without the fault.

Where no majority says which copy is wrong, the run ends. It also ends at a device's second time, in any visit, with the
line that leaves its host out. A device is known by its host and its number there, as a later visit may number all
devices in another way.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax

from jdp.core.cluster.barrier import from_every_process, from_first_process
from jdp.core.types import Device
from jdp.guard.bad_steps import BadSteps, GoBack
from jdp.guard.flight_recorder import Flight
from jdp.guard.replicas import CorruptState, Difference, in_words, raise_for
from jdp.run.outputs.history import HISTORY, ROLLED_BACK, read_history

_SCHEDULER_NAMES = ("SLURMD_NODENAME", "JDP_NODE_NAME")
"""Variables with the name by which a scheduler knows this host; experiments/cluster/jobset.yaml sets the second."""


class WrongDevice(GoBack):
    """A device has other bits than those that should have the same."""

    def __init__(self, why: str, equal_at: int, bad: BadSteps, devices: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(why, equal_at + 1, bad.left_out, bad.returns)
        self.recorded = {"wrong_devices": devices}


class DefectiveDevice(CorruptState):
    """A device differed for the second time: starting again alone does not help."""

    exit_code = 78


def go_back_from(
    differences: Sequence[Difference], step: int, equal_at: int, bad: BadSteps, flight: Flight
) -> NoReturn:
    """Go back from differences after `step` to a checkpoint of step `equal_at` at the latest, or end the run.

    Raises:
        WrongDevice: the run goes back.
        DefectiveDevice: one of the devices is at fault for the second time.
        CorruptState: no majority says which copy is wrong.
    """
    raise_for([each for each in differences if not each.agreeing], f"the state after step {step}")
    hosts = from_every_process("the host of a device that differs", _host())
    devices = [_located(device, hosts) for device in dict.fromkeys(one for each in differences for one in each.devices)]
    where = ", ".join(dict.fromkeys(f"on host {device['host']}" for device in devices))
    why = f"after step {step} {in_words(differences)}, {where}"
    flight.event("corrupt", step=step, words=f"{why[:1].upper()}{why[1:]}.")
    before = json.loads(from_first_process("the devices that differed before", json.dumps(_earlier(flight))))
    again = [device for device in devices if _place(device) in map(_place, before)]
    if not again:
        raise WrongDevice(why, equal_at, bad, devices)
    raise DefectiveDevice(
        f"A device must not compute wrong twice; given, for the second time, {why}. Nothing was saved of it. "
        f"{leave_out(again[0]['host'], again[0]['number'], hosts, os.environ)}. The run resumes.",
        differences,
    )


def _located(device: Device, hosts: Sequence[str]) -> dict[str, Any]:
    """Return a device's host, and its number among the devices there; `hosts` has the host of each process."""
    host = hosts[device.process_index]
    there = [each.id for each in jax.devices(device.platform) if hosts[each.process_index] == host]
    return {"device": device.id, "host": host, "number": there.index(device.id)}


def _place(device: Mapping[str, Any]) -> tuple[Any, Any]:
    return device.get("host"), device.get("number")


def _earlier(flight: Flight) -> list[dict[str, Any]]:
    """Return the devices for which the run went back before; only process 0 may ask, whose history it is."""
    if jax.process_index():
        return []
    history: Path = flight.file.parent.parent / HISTORY
    found = [event.get("wrong_devices") for event in read_history(history) if event["event"] == ROLLED_BACK]
    return [device for devices in found if isinstance(devices, list) for device in devices if isinstance(device, dict)]


def _host() -> str:
    """Return the name of this host by which its scheduler takes it out."""
    return next(filter(None, map(os.environ.get, _SCHEDULER_NAMES)), socket.gethostname())


def leave_out(host: str, number: int, hosts: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return how to run without a host, by what started the processes; without a device where all are on that host."""
    others = len(set(hosts)) - 1
    if "SLURM_JOB_ID" in environment:
        return f"Leave host {host} out: sbatch --exclude={host} JOB.sh"
    if "JOB_COMPLETION_INDEX" in environment:
        return f"Leave host {host} out: kubectl cordon {host}"
    if not others:
        return f"It is device {number} of the only host, {host}: run on another, or without it (CUDA_VISIBLE_DEVICES)"
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return f"Leave host {host} out: mpirun --host with the {others} others, or a --hostfile without it"
    return f"Leave host {host} out: jdp launch --nodes {others}, on the others alone"
