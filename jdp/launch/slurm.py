"""A batch script for Slurm: a run that goes on after preemption, time limits and lost nodes.

One task a node drives all of its GPUs. `srun` starts the tasks, and `jdp.initialize` finds the others in the step's
variables. The cause of their end decides how the job goes on:

| cause                          | exit code          | then                                               |
|--------------------------------|--------------------|----------------------------------------------------|
| time limit near, preempted     | 75, after saving   | the script queues the job again                    |
| the same, before a checkpoint  | 75                 | as if a process had died                           |
| a node                         | –                  | Slurm queues the job again (`--requeue`)           |
| a process, or the program      | 70, 128 + signal   | the script queues it again, `max_restarts` times   |
| a mistake, Ctrl-C              | 1, 2, 78, 130      | the job has failed                                 |
| scancel                        | 75, after saving   | nothing: the job is no longer running              |
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

SIGNAL_SECONDS = 300  # before the time limit, for the step that runs and for the checkpoint
WAIT_SECONDS = 60  # after the first task has ended, until the others are killed


@dataclass(frozen=True)
class SlurmJob:
    """The parameters of a batch script.

    Attributes:
        max_restarts: how often the job may start again after a process died, or one left with 75 and no newer
            checkpoint. Preemption that brought the run forward does not count, nor do nodes that Slurm lost.
    """

    name: str  # of the job
    command: Sequence[str]  # program and arguments of each task
    folder: str  # working directory of the tasks
    nodes: int  # number of nodes; each has one task
    gpus_per_node: int  # 0 for a run on CPUs
    time: str | None = None  # Slurm's `--time`; None for the partition's own limit
    max_restarts: int = 3
    directives: Sequence[str] = ()  # further options of sbatch, such as "partition=gpu"


def batch_script(job: SlurmJob) -> str:
    """Return the text that `sbatch` takes."""
    options = [f"job-name={job.name}", f"nodes={job.nodes}", "ntasks-per-node=1"]
    options += [f"gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []
    options += ["exclusive", "mem=0"]
    options += [f"time={job.time}"] if job.time is not None else []
    options += ["requeue", f"signal=TERM@{SIGNAL_SECONDS}", "open-mode=append", "output=%x-%j.log", *job.directives]
    each = f"{job.gpus_per_node} GPUs" if job.gpus_per_node else "its CPUs"
    return _SCRIPT.format(
        name=job.name,
        size=f"{job.nodes} nodes, a task on each with {each}",
        options="\n".join(f"#SBATCH --{option}" for option in options),
        folder=shlex.quote(job.folder),
        wait=WAIT_SECONDS,
        command=shlex.join(job.command),
        max_restarts=job.max_restarts,
        signal_seconds=SIGNAL_SECONDS,
    )


_SCRIPT = """\
#!/bin/bash
# {name}: {size}. Written by `jdp manifest slurm`; submit it with sbatch.
#
# Whole nodes, with all their cores and memory. {signal_seconds} seconds before the time limit, and when the job is
# preempted, the tasks get SIGTERM: they save and leave with 75, and the job is queued again. It then goes on from its
# last checkpoint.
{options}

trap : TERM  # if this shell gets it too, it still waits for the tasks
cd {folder} || exit 2
counter=.jdp-$SLURM_JOB_ID.restarts  # how many of the restarts below were made
export JDP_PROGRESS_FILE=$PWD/.jdp-$SLURM_JOB_ID.progress  # process 0 writes the step of its last checkpoint there
# Only processes with this secret are heard on jdp's own ports (`jdp doctor`, `jdp launch`). It is new at each start.
[ -n "$JDP_SECRET$JDP_SECRET_FILE" ] || export JDP_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
saved() {{ cat "$JDP_PROGRESS_FILE" 2>/dev/null || echo 0; }}
before=$(saved)
# A task uses every core of its node. After the first one has ended the others have {wait} seconds to save and end.
srun --label --cpu-bind=none --kill-on-bad-exit=0 --wait={wait} \\
  {command}
code=$?

requeue() {{
  state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
  [ "$state" = RUNNING ] || return  # Slurm ended the job, and decides: it was cancelled, or a node was lost
  [ -z "$2" ] || echo "$2" > "$counter"
  echo "exit code $code: job $SLURM_JOB_ID is queued again, $1"
  scontrol requeue "$SLURM_JOB_ID"
}}
restarts=$(cat "$counter" 2>/dev/null || echo 0)
if [ $code -eq 75 ] && [ "$(saved)" != "$before" ]; then
  requeue "to go on where it saved"
elif [ "$restarts" -lt {max_restarts} ] &&  # it saved nothing new, or a process died or lost another
  {{ [ $code -eq 75 ] || [ $code -eq 70 ] || {{ [ $code -gt 130 ] && [ $code -ne 141 ]; }}; }}; then
  requeue "restart $((restarts + 1)) of {max_restarts}" $((restarts + 1))
else
  rm -f "$counter" "$JDP_PROGRESS_FILE"
fi
exit $code
"""
