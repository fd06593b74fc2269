"""The tensors of a file and their parameters: a table name -> `Tensor`, for export and import.

A tensor is one `Part` or several, joined along their last dim; a part is a complete parameter, or one layer of a
stacked parameter. A tensor may be stored transposed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jdp.base.tree_paths import matches
from jdp.checkpoint.errors import CheckpointError
from jdp.models import GPTConfig


@dataclass(frozen=True)
class Part:
    """A parameter, or one layer of stacked parameters.

    Attributes:
        path: of the parameter, with slashes: "layers/attention/query/kernel".
        layer: index of its leading dim; None: the complete parameter.
    """

    path: str
    layer: int | None = None


@dataclass(frozen=True)
class Tensor:
    """The parameters of one tensor of a file.

    Attributes:
        parts: the parameters, joined along their last dim.
        transposed: True if the last two dims of the joined parameters are swapped in the file.
    """

    parts: tuple[Part, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Names:
    """The tensors of a file, and other names that it may have.

    Attributes:
        tensors: name in the file -> tensor; each parameter, or each layer of it, exactly once.
        ignored: patterns (`fnmatch`) of names that an import does not read, such as tables of constants.
        config: the model of these names, compared with a `config.json` beside the file; None: unknown.
        copies: optional name -> the tensor that it repeats.
        vocabulary: the tensors with a row for each token; a file may have fewer rows.
    """

    tensors: Mapping[str, Tensor]
    ignored: tuple[str, ...] = ()
    config: GPTConfig | None = None
    copies: Mapping[str, str] = field(default_factory=dict[str, str])
    vocabulary: tuple[str, ...] = ()


def resolve(names: Names | Mapping[str, str | Tensor] | None, leaves: Mapping[str, Any]) -> Names:
    if names is None:
        return Names({path.replace("/", "."): Tensor((Part(path),)) for path in leaves})
    if isinstance(names, Names):
        return names
    return Names({name: Tensor((Part(given),)) if isinstance(given, str) else given for name, given in names.items()})


def check_cover(names: Names, leaves: Mapping[str, Any], missing: Sequence[str] = ()) -> None:
    """Check that every leaf, or every layer of a leaf named by layers, is in exactly one tensor."""
    named: dict[str, list[int | None]] = {}
    for name, tensor in names.tensors.items():
        for part in tensor.parts:
            if part.path not in leaves:
                some = ", ".join([*leaves][:3]) + ", ..." * (len(leaves) > 3)
                raise CheckpointError(
                    f"The names map {name} to {part.path}, but the model has no such parameter; it has {some}. Make "
                    "the names for this model's configuration."
                )
            named.setdefault(part.path, []).append(part.layer)
    for path, leaf in leaves.items():
        layers = named.get(path, [])
        if not layers and matches(path, missing):
            continue
        whole = layers == [None]
        by_layer = bool(leaf.shape) and None not in layers and sorted(layers) == list(range(leaf.shape[0]))  # pyright: ignore[reportArgumentType]
        if not whole and not by_layer:
            raise CheckpointError(
                f"Each parameter needs one name, or one for each layer; {path} {list(leaf.shape)} has "
                f"{'none' if not layers else f'{len(layers)}'}. Add it to the names, or remove the parameter."
            )


def file_shape(tensor: Tensor, leaves: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape that a tensor has in a file."""
    shapes = [part_shape(part, leaves) for part in tensor.parts]
    joined = (*shapes[0][:-1], sum(shape[-1] for shape in shapes)) if len(shapes) > 1 else shapes[0]
    return (*joined[:-2], joined[-1], joined[-2]) if tensor.transposed else joined


def part_shape(part: Part, leaves: Mapping[str, Any]) -> tuple[int, ...]:
    shape = tuple(leaves[part.path].shape)
    return shape if part.layer is None else shape[1:]
