"""The table [wire]: the bytes between devices."""

from typing import Annotated, Any

from pydantic import Field, PlainValidator

from jdp.base.words import Buckets, Encoding, WeightEncoding
from jdp.experiment.schema.fields import Positive, Section, Single

_MOST_BYTES = 2**40


def _buckets(given: Any) -> Any:
    if given != "auto" and (type(given) is not int or not 1 <= given <= _MOST_BYTES):
        raise ValueError(f'must be a number of bytes, 1 to {_MOST_BYTES}, or "auto"')
    return given


BucketSize = Annotated[Buckets, PlainValidator(_buckets)]


class WireTable(Section):
    """[wire]: fewer bytes between devices, and fewer, larger messages. jdp then places the collectives (manual)."""

    gradients: Encoding | None = None
    """How gradients are encoded; they are added up in fp32, and what encoding loses is added to the next. none = as
    `reduce` says. topk and powersgd are for sgd: with adamw the quickstart's loss is 20 % higher."""
    weights: WeightEncoding | None = None
    """How weights are encoded where zero1, zero2 and zero3 gather them; none = as `precision` says."""
    block: Annotated[int, Field(ge=8, le=2**20)] = 256
    """Elements that share a scale, for int8 and fp8."""
    fraction: Annotated[float, Field(gt=0, le=1), Single] = 0.01
    """Share of the elements that topk sends."""
    rank: Positive = 4
    """Rank of the factors of powersgd."""
    error_feedback: bool = True
    """Keep what encoding lost, in fp32 on every device, and add it to the next gradient."""
    buckets: BucketSize | None = None
    """Bytes of gradients in one collective, "auto" = jdp chooses; none = one for each parameter."""
