"""Which tensor of a file holds which parameter.

A tensor of a file is made of one parameter or of several, joined along their last dim, each a whole leaf or one layer
of a stack; it may be stored transposed. So a table name -> `Tensor` reads in both directions.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jdp.checkpoint.errors import CheckpointError
from jdp.models import GPTConfig


@dataclass(frozen=True)
class Part:
    """A parameter by its slash path; with `layer`, that index of its leading dim."""

    path: str
    layer: int | None = None


@dataclass(frozen=True)
class Tensor:
    """How one tensor of a file is made.

    Attributes:
        parts: the parameters, joined along their last dim.
        transposed: whether the file has the last two dims the other way round.
    """

    parts: tuple[Part, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Names:
    """The tensors of a file, and what else may be in it.

    Attributes:
        tensors: name in the file -> how it is made; each parameter, or each layer of it, exactly once.
        ignored: patterns (`fnmatch`) of names in a file that an import leaves alone, such as tables of constants.
        config: the model that the names are of, to hold a `config.json` beside the file against; None: unknown.
    """

    tensors: Mapping[str, Tensor]
    ignored: tuple[str, ...] = ()
    config: GPTConfig | None = None


def resolve(names: Names | Mapping[str, str | Tensor] | None, leaves: Mapping[str, Any]) -> Names:
    """The names to go by: those given, where a plain mapping from name to path will do, or the paths with dots."""
    if names is None:
        return Names({path.replace("/", "."): Tensor((Part(path),)) for path in leaves})
    if isinstance(names, Names):
        return names
    return Names({name: Tensor((Part(to),)) if isinstance(to, str) else to for name, to in names.items()})


def check_cover(names: Names, leaves: Mapping[str, Any], missing: Sequence[str] = ()) -> None:
    """Every leaf, and every layer of it that is named by layers, is in exactly one tensor.

    Raises:
        CheckpointError: a name leads to nothing, or a leaf has none and `missing` does not match it.
    """
    seen: dict[str, list[int | None]] = {}
    for name, tensor in names.tensors.items():
        for part in tensor.parts:
            if part.path not in leaves:
                raise CheckpointError(
                    f"The names say that {name} holds {part.path}, and the model has no such parameter; it has "
                    f"{_some(leaves)}. Make the names for this model's configuration."
                )
            seen.setdefault(part.path, []).append(part.layer)
    for path, leaf in leaves.items():
        layers = seen.get(path, [])
        if not layers and any(fnmatch.fnmatchcase(path, pattern) for pattern in missing):
            continue
        whole = layers == [None]
        by_layer = bool(leaf.shape) and None not in layers and sorted(layers) == list(range(leaf.shape[0]))  # pyright: ignore[reportArgumentType]
        if not whole and not by_layer:
            raise CheckpointError(
                f"Each parameter needs one name, or one a layer; {path} {list(leaf.shape)} has "
                f"{'none' if not layers else f'{len(layers)}'}. Add it to the names, or leave it out of what is given."
            )


def file_shape(tensor: Tensor, leaves: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape a tensor has in a file."""
    shapes = [part_shape(part, leaves) for part in tensor.parts]
    joined = (*shapes[0][:-1], sum(shape[-1] for shape in shapes)) if len(shapes) > 1 else shapes[0]
    return (*joined[:-2], joined[-1], joined[-2]) if tensor.transposed else joined


def part_shape(part: Part, leaves: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of a part, in the model's orientation."""
    shape = tuple(leaves[part.path].shape)
    return shape if part.layer is None else shape[1:]


def _some(leaves: Mapping[str, Any]) -> str:
    return ", ".join(list(leaves)[:3]) + (", ..." if len(leaves) > 3 else "")
