"""End the run if a device's copy of the state differs from the others', and name its host.

The fault may be older than the step after which it was detected. Since then its gradients were summed with all others',
so overwriting the copy does not give the right state. Copies are compared before each save, so every checkpoint is from
before the fault: a run that restarts without that host gets the same bits as a run without the fault.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

import jax

from jdp.core.cluster.barrier import from_every_process
from jdp.core.types import Device
from jdp.guard.flight_recorder import Flight
from jdp.guard.replicas import CorruptState, Difference, in_words

_SCHEDULER_NAMES = ("SLURMD_NODENAME", "JDP_NODE_NAME")
"""Variables with the scheduler's name for this host; experiments/cluster/jobset.yaml sets the second."""


class WrongDevice(CorruptState):
    """A device's bits differ from those of its replicas: a restart alone does not help."""

    exit_code = 78


def check_devices(differences: Sequence[Difference], step: int, flight: Flight) -> None:
    """End the run if copies of the state after a step differ. All processes call it with the same differences.

    Raises:
        WrongDevice: names devices, hosts and leaves, and how to leave the host out.
    """
    if not differences:
        return
    hosts = from_every_process("the host of a device that differs", _host())
    devices = tuple(dict.fromkeys(device for each in differences for device in each.devices))
    where = dict.fromkeys(hosts[device.process_index] for device in devices)
    why = f"after step {step} {in_words(differences)}, on host {', '.join(where)}"
    flight.event("corrupt", step=step, words=f"{why[:1].upper()}{why[1:]}.")
    if differences[0].agreeing:
        advice = leave_out(devices[0], hosts, os.environ)
    else:
        advice = "No majority shows which device is wrong: test both (`jdp doctor`), and leave out the faulty host"
    raise WrongDevice(
        f"All copies of the state must be equal bit for bit; given {why}. Nothing of it was saved. {advice}. Then run "
        "again: it resumes from the previous checkpoint.",
        differences,
    )


def _host() -> str:
    """Return the scheduler's name for this host."""
    return next(filter(None, map(os.environ.get, _SCHEDULER_NAMES)), socket.gethostname())


def leave_out(device: Device, hosts: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return how to run without a device's host under this launcher; `hosts` has each process' host."""
    host, others = hosts[device.process_index], len(set(hosts)) - 1
    if "SLURM_JOB_ID" in environment:
        return f"Leave host {host} out: sbatch --exclude={host} JOB.sh"
    if "JOB_COMPLETION_INDEX" in environment:
        return f"Leave host {host} out: kubectl cordon {host}"
    if not others:
        there = [each.id for each in jax.devices(device.platform) if hosts[each.process_index] == host]
        number = there.index(device.id)
        return f"It is device {number} of the only host, {host}: run on another, or without it (CUDA_VISIBLE_DEVICES)"
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return f"Leave host {host} out: mpirun --host with the {others} others, or a --hostfile without it"
    return f"Leave host {host} out: jdp launch --nodes {others}, on the others alone"
