"""The configuration of an MLP."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from jdp.models.checks import require, require_choice

Activation = Literal["relu", "gelu", "silu", "tanh"]


@dataclass(frozen=True)
class MLPConfig:
    """Shape of an MLP.

    Fields:
        features_in, hidden, features_out: sizes of the input, of each hidden layer (may be empty), of the output.
        activation: after each hidden layer.
        dropout: rate after each activation.

    Raises:
        ValueError: a size that is not a positive integer, a rate outside [0, 1), an unknown activation.

    >>> MLPConfig(features_in=4, hidden=(8, 8), features_out=2).activation
    'relu'
    """

    features_in: int
    hidden: tuple[int, ...]
    features_out: int
    activation: Activation = "relu"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        require(type(self.hidden) is tuple, "hidden is a tuple of sizes", repr(self.hidden), "Write (512, 512)")
        sizes: tuple[Any, ...] = (self.features_in, *self.hidden, self.features_out)
        positive = all(isinstance(size, int) and size > 0 for size in sizes)
        require(positive, "features are positive integers", f"in -> hidden -> out {sizes}", "Raise the others")
        require_choice(self, activation=get_args(Activation))
        require(0.0 <= self.dropout < 1.0, "dropout is a rate in [0, 1)", f"{self.dropout}", "0 turns it off")
