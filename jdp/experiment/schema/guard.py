"""The table [guard]: what watches over a run while it goes on."""

from typing import Annotated

from pydantic import Field

from jdp.experiment.schema.fields import Count, Section, Single, Whole


class Guard(Section):
    """[guard]: what watches over a run. It may differ between the visits of a run."""

    deadline_seconds: Count = 300
    """Seconds within which a step must end, or ten times the median step if that is longer; else all processes say
    where they are, and leave with exit code 75 (run again); 0 = no deadline."""
    first_deadline_seconds: Count = 3600
    """The same for what happens once: the first step and the first batch of an evaluation, which compile, a restore
    and a save; 0 = no deadline."""
    check_replicas_every: Count = 100
    """Steps between comparisons, bit for bit, of what several devices should hold alike; also made before each
    checkpoint. A device that differs is named, and the run ends with exit code 70; 0 = never."""
    replay_every: Count = 0
    """Steps between those that are taken twice, and must give equal bits; it takes memory for another state,
    and on GPUs --xla_gpu_deterministic_ops=true in XLA_FLAGS. 0 = never."""
    inspect_bad_steps: bool = True
    """After a step without a finite gradient: compute it once more, say where it broke, and keep the batch in the run's
    folder flight/; for three at most, until the run is resumed or goes back. It compiles another program."""
    spike_deviations: Annotated[float, Field(ge=0), Single] = 0.0
    """A loss so many standard deviations above its running mean is a spike, and its step a bad one; OLMo 2 counts from
    7 on. 0 = none is."""
    spike_window: Annotated[int, Field(ge=2), Whole] = 1000
    """Steps that the running mean reaches back."""
    roll_back_after: Annotated[int, Field(ge=0, le=50)] = 0
    """After so many bad steps in a row (no finite gradient, or a spike) go back to the checkpoint before them, and
    leave their batches out; 0 = never."""
    leave_out_before: Count = 1
    """How many steps before the first bad one are left out too: one of them may have spoilt the weights."""
    check_hosts_every: Count = 20
    """Steps between comparisons of how late each process' host is; one that costs more than 5 % of a step is named.
    0 = never."""
