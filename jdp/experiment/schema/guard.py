"""The table [guard]: what watches over a run while it goes on."""

from jdp.experiment.schema.fields import Count, Section


class Guard(Section):
    """[guard]: what watches over a run. It may differ between the visits of a run."""

    deadline_seconds: Count = 300
    """Seconds within which a step must end, or ten times the median step if that is longer; else all processes say
    where they are, and leave with exit code 75 (run again); 0 = no deadline."""
    first_deadline_seconds: Count = 3600
    """The same for what happens once: the first step and the first batch of an evaluation, which compile, a restore
    and a save; 0 = no deadline."""
