"""The table [loss]: what is minimised."""

from typing import Annotated

from pydantic import AfterValidator

from jdp.experiment.schema.fields import Section
from jdp.experiment.schema.registered import Table


def _loss_name(name: str | None) -> str | None:
    return None if name is None else LOSSES.check(name)


class LossTable(Section):
    """[loss]: what is minimised."""

    name: Annotated[str | None, AfterValidator(_loss_name)] = None
    """A loss that the plug-in registers, whose fields may be given beside it; none = the cross-entropy of the model's
    next token or class."""


LOSSES = Table("loss")
