"""The table [local_steps]: steps that every replica takes by itself."""

from typing import Annotated

from pydantic import Field

from jdp.experiment.schema.fields import Positive, Section, Single


class LocalStepsTable(Section):
    """[local_steps]: rounds of steps without synchronisation over `replica` (local SGD, DiLoCo)."""

    steps: Positive | None = None
    """Optimizer steps that every replica takes by itself in a round, which counts as one of train.steps; batch_size is
    the samples of a round. none = every step is synchronised."""
    lr: Annotated[float, Field(gt=0, le=10), Single] = 1.0
    """Outer learning rate; 1 = take the mean of the replicas' weights; DiLoCo has 0.7."""
    momentum: Annotated[float, Field(ge=0, lt=1), Single] = 0.0
    """Outer Nesterov momentum; DiLoCo has 0.9."""
