"""The table [track]: where a run's metrics go besides its own folder."""

from typing import Annotated

from pydantic import Field

from jdp.experiment.schema.fields import Section

Name = Annotated[str, Field(min_length=1)]


class Track(Section):
    """[track]: where metrics go besides the run's folder, which always has metrics.jsonl and TensorBoard events."""

    wandb: Name | None = None
    """Weights & Biases project, or ENTITY/PROJECT; WANDB_MODE=offline keeps it in the run's folder."""
    mlflow: Name | None = None
    """MLflow experiment; MLFLOW_TRACKING_URI says on which server."""
