"""Choices that several models share, and rules for configurations and inputs.

A broken rule is one error with the rule, the values given and the fix.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

from typing import Literal, get_args

from jdp.base.errors import UserError


def require(holds: bool, rule: str, given: str, fix: str) -> None:
    """Raise ValueError("RULE; given GIVEN. FIX.") unless the rule holds; `fix` has no full stop."""
    if not holds:
        raise UserError(f"{rule}; given {given}. {fix}.")


def require_positive(config: Any, *names: str, optional: Sequence[str] = ()) -> None:
    """Raise ValueError unless these fields are positive integers; those in `optional` may be None."""
    for name in (*names, *optional):
        value = getattr(config, name)
        fits = type(value) is int and value > 0
        require(fits or (value is None and name in optional), f"{name} is a positive integer", repr(value), "Raise it")


def require_choice(config: Any, **choices: Sequence[Any]) -> None:
    """Raise ValueError unless each field has one of its allowed values."""
    for name, among in choices.items():
        value = getattr(config, name)
        fix = f"Choose one of {tuple(among)}"
        require(value in among, f"there is no {name} of that name", repr(value), fix)


def require_rates(config: Any, *, eps: str = "1e-5") -> None:
    """Raise ValueError unless a transformer's `dropout` and `norm_eps` are in range; `eps` is the usual `norm_eps`."""
    require(0.0 <= config.dropout < 1.0, "dropout is a rate in [0, 1)", f"{config.dropout}", "0 turns it off")
    require(config.norm_eps > 0, "norm_eps is positive", f"{config.norm_eps}", f"{eps} is usual")


def require_heads(width: int, heads: int) -> None:
    """Raise ValueError unless the number of heads divides the width."""
    require(
        width % heads == 0,
        "heads must divide width",
        f"width({width}) % heads({heads}) = {width % heads}",
        f"Make width a multiple of {heads}, for instance {-(-width // heads) * heads}",
    )


def require_images(images: "jax.Array", *, channels: int, size: int | None = None) -> None:
    """Raise ValueError unless images are [batch, height, width, channels] floats, of `size` pixels a side if given."""
    from jax.numpy import floating, issubdtype  # here: configurations are checked without JAX

    given = f"{images.dtype}{list(images.shape)}"
    floats = issubdtype(images.dtype, floating)
    is_images = images.ndim == 4 and images.shape[3] == channels and floats
    fix = "Pass a batch of floats, already normalised, colours last"
    require(is_images, f"images are [batch, height, width, channels({channels})] floats", given, fix)
    fits = size is None or images.shape[1:3] == (size, size)
    require(fits, f"images are image_size({size}) pixels high and wide", given, "Resize them, or change image_size")


Activation = Literal["swiglu", "gelu", "gelu_exact"]
NormKind = Literal["rms", "layer"]
Attend = Literal["auto", "xla", "cudnn"]
Remat = Literal["dots", "dots_except_mlp", "full"]
Scan = bool | Literal["auto"]
SCANS = (True, False, "auto")
REMATS = (None, *get_args(Remat))
