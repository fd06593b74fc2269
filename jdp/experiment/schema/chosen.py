"""The tables whose keys depend on their name: a size of jdp's models, or an entry that a plug-in registered."""

from collections.abc import Mapping
from typing import Any

from jdp.experiment.schema.data import DATASETS, Data
from jdp.experiment.schema.fields import Section
from jdp.experiment.schema.model import MODELS, model_table
from jdp.experiment.schema.optimizer import LOSSES, OPTIMIZERS, LossTable, Optimizer

TABLES = (MODELS, DATASETS, LOSSES, OPTIMIZERS)


def chosen_tables(table: Mapping[str, Any]) -> dict[str, type[Section] | None]:
    """Return the schema of each table whose keys depend on its name."""
    names = {key: inner.get("name") for key, inner in table.items() if isinstance(inner, Mapping)}
    model = table.get("model")
    chosen: dict[str, type[Section] | None] = {"model": model_table(model) if isinstance(model, Mapping) else None}
    for registered, base in ((DATASETS, Data), (LOSSES, LossTable), (OPTIMIZERS, Optimizer)):
        if schema := registered.section(names.get(registered.key), base):
            chosen[registered.key] = schema
    return chosen
