"""The validated experiment file: read it, change it from the command line, write it back, hold it against the devices.

`load` goes from a TOML file to an `Experiment` (its keys are in `schema.py`): parse, lay the `--a.b value` overrides on
top, validate; all problems are said at once, as one `ExperimentError`. `to_toml` writes it as resolved. What needs the
number of devices waits for `check_for_devices`. Nothing below the training loop ever sees an experiment.
"""

import copy
import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from jdp.core.batch import nearest_sizes
from jdp.core.formatting import format_bytes
from jdp.core.sharding.mesh import DATA, REPLICA, axis_sizes
from jdp.core.toml import check, cut, parse, toml_key, toml_value
from jdp.core.user_path import PathError, check_regular, user_path
from jdp.experiment.keys import Key, Schemas, config_keys, table_keys
from jdp.experiment.problems import problems
from jdp.experiment.schema.experiment import NONE, Experiment, Model, model_table
from jdp.models.sizes import SIZES

KeyPath = tuple[str, ...]
HUB = "hf:"
MOST_BYTES = 2**26
"""Of an experiment file: more is another file, named by mistake."""
NO_PATHS = ("stdlib", "digits", NONE)
"""Sources of data that are words, not paths."""


class ExperimentError(ValueError):
    """Something is wrong with an experiment file; the message lists every problem, one a line."""


def load(path: str | Path, overrides: Mapping[str, str] | None = None) -> Experiment:
    """Read and check an experiment file.

    Args:
        path: a TOML file. Relative paths in `data.source` start at the file's own folder.
        overrides: dotted key -> text as on a command line, such as {"train.steps": "50"}: read as a TOML value where
            that fits the key, else as text. Relative paths in an overriding `data.source` start at the working
            directory.

    Raises:
        ExperimentError: the file cannot be read, is not TOML, or does not make an experiment.
    """
    try:
        file = user_path(path)
    except PathError as error:
        raise ExperimentError(f"the experiment file: {error}") from None
    table = _read(file)
    _anchor_paths(table, file.parent)
    texts = {tuple(key.split(".")): text for key, text in (overrides or {}).items()}
    changed: dict[str, Any] = {}
    for key, text in texts.items():
        _put(changed, key, _value(text), where=str(file))
    _check_limits(changed, "the command line")
    _anchor_paths(changed, Path.cwd())
    return _validated(_merged(table, changed), texts, where=str(file))


def from_table(table: Mapping[str, Any], *, where: str = "experiment") -> Experiment:
    """Check a table that did not come from a file. Raises ExperimentError as `load` does; paths stay as they are."""
    _check_limits(table, where)
    return _validated(copy.deepcopy(dict(table)), {}, where=where)


def to_toml(experiment: Experiment) -> str:
    """The experiment as resolved, every key written; `load` reads it back as an equal one."""
    return "\n".join(_written(experiment, ())) + "\n"


def _written(table: Mapping[str, Any] | BaseModel, path: KeyPath) -> list[str]:
    """The lines of a table: its keys, then the tables in it, each below its heading."""
    items = {name: getattr(table, name) for name in type(table).model_fields} if isinstance(table, BaseModel) else table
    inner = {key: value for key, value in items.items() if isinstance(value, BaseModel | Mapping)}
    lines = [_line(key, value) for key, value in items.items() if key not in inner and not (_is_table((*path, key)))]
    heading = [f"\n[{'.'.join(map(toml_key, path))}]"] if path and (lines or not inner) and items else []
    return [*heading, *lines, *(line for key, value in inner.items() for line in _written(value, (*path, key)))]


def check_for_devices(experiment: Experiment, device_count: int) -> dict[str, int]:
    """Hold the mesh and the batch size against a number of devices (of all processes together).

    Returns:
        The mesh with its -1 filled in: axis -> size.

    Raises:
        ExperimentError: the mesh does not multiply to `device_count`, or the batch does not divide over it.
    """
    sizes = mesh_sizes(experiment.mesh, device_count)
    split = {axis: sizes[axis] for axis in (REPLICA, DATA) if axis in sizes}
    split["train.accumulate"] = experiment.train.accumulate
    share, batch = math.prod(split.values()), experiment.train.batch_size
    if batch % share:
        raise ExperimentError(
            f"train.batch_size must divide by {_equation(split)} (every device gets as many samples in every "
            f"microbatch); given {batch}: the nearest that fit: {nearest_sizes(batch, share)}"
        )
    return sizes


def describe() -> list[tuple[str, list[Key]]]:
    """Every key of an experiment file, in groups with a heading, for `jdp train --help`."""
    groups = [("top level", table_keys(Experiment))]
    for path, table in Schemas(Experiment, Model).tables():
        name = ".".join(path)
        groups.append((" ".join((table.__doc__ or "").split()), _below(name, table_keys(table))))
        if table is Model:
            for kind in {type(size): None for size in SIZES.values()}:
                sizes = ", ".join(name for name, size in SIZES.items() if isinstance(size, kind))
                groups.append((f"[model] fields of {sizes}", _below(name, config_keys(kind))))
    return groups


def _below(table: str, keys: list[Key]) -> list[Key]:
    return [replace(key, name=f"{table}.{key.name}") for key in keys]


def _read(file: Path) -> dict[str, Any]:
    """The file's table, or what is wrong with the file."""
    try:
        content = _bytes(file)
    except FileNotFoundError:
        raise ExperimentError(f"{file}: there is no such file{_files_nearby(file)}") from None
    except IsADirectoryError:
        raise ExperimentError(f"{file} is a folder, not an experiment file{_files_nearby(file / 'x')}") from None
    except OSError as error:
        raise ExperimentError(f"{file} cannot be read: {error.strerror}") from None
    try:
        return parse(content.decode("utf-8-sig"))  # editors of Windows put a mark before the text
    except UnicodeDecodeError:
        raise ExperimentError(f"{file} is not text in UTF-8; an experiment file is TOML") from None
    except ValueError as error:
        raise ExperimentError(f"{file} {error}") from None


def _bytes(file: Path) -> bytes:
    """All of a file. A pipe or a device is refused: runs of a sweep, and processes, each read the file anew."""
    check_regular(file)
    if (size := file.stat().st_size) > MOST_BYTES:
        raise ExperimentError(
            f"{file} is no experiment file: it has {format_bytes(size)}, at most {format_bytes(MOST_BYTES)} "
            "are read: name the TOML file"
        )
    return file.read_bytes()


def _check_limits(table: Mapping[str, Any], where: str) -> None:
    """Raises ExperimentError for what `parse` would not have read, in a table that came from elsewhere."""
    try:
        check(table)
    except ValueError as error:
        raise ExperimentError(f"{where} {error}") from None


def _files_nearby(file: Path) -> str:
    """The experiment files in the same folder, those with a similar name first."""
    names = sorted(path.name for path in file.parent.glob("*.toml"))
    if not names:
        return "" if file.parent.is_dir() else f", nor a folder {file.parent}"
    alike = difflib.get_close_matches(file.name, names, n=3, cutoff=0.4)
    return f"; near it: {', '.join(str(file.parent / name) for name in alike or names[:5])}"


def _anchor_paths(table: dict[str, Any], folder: Path) -> None:
    """Make the relative paths in the table start at `folder`: of data, the tokenizer, the model and its weights."""
    data = _table(table, "data")
    for one in (data, *_tables(data, "mixture"), *_tables(table, "eval")):
        _anchor(one, "source", folder, but=NO_PATHS)
    _anchor(data, "tokenizer", folder, but=("bytes", NONE))
    _anchor(data, "heldout", folder, but=NO_PATHS)
    _anchor(_table(table, "train"), "init_from", folder, but=(NONE,))
    model = _table(table, "model")
    name = model.get("name")
    if isinstance(name, str) and name.startswith(HUB):  # always a folder here, never a name on the hub
        anchored = {"folder": name.removeprefix(HUB)}
        _anchor(anchored, "folder", folder, but=())
        model["name"] = HUB + anchored["folder"]


def _anchor(table: dict[str, Any], key: str, folder: Path, *, but: tuple[str, ...]) -> None:
    def anchored(path: Any) -> Any:
        if not isinstance(path, str) or path in ("", *but):
            return path
        if path.startswith(HUB):  # a name on the hub, unless it is plainly a path
            rest = path.removeprefix(HUB)
            return HUB + anchored(rest) if rest.startswith((".", "~")) else path
        try:
            return str((folder / user_path(path)).absolute())
        except PathError:  # the schema says the same of it, with its key
            return path

    if key in table:
        value = table[key]
        table[key] = [anchored(item) for item in value] if isinstance(value, list) else anchored(value)


def _table(table: dict[str, Any], key: str) -> dict[str, Any]:
    """The table at `key`; an empty one if something else, or nothing, stands there."""
    inner = table.get(key)
    return inner if isinstance(inner, dict) else {}


def _tables(table: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The tables in the table at `key`, such as [eval.NAME]."""
    return [inner for inner in _table(table, key).values() if isinstance(inner, dict)]


def _value(text: str) -> Any:
    """What `text` means as a TOML value; the text itself where it means nothing."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if len(table) == 1 else text


def _put(table: dict[str, Any], key: KeyPath, value: Any, *, where: str) -> None:
    """Set a dotted key, making tables on the way."""
    *outer, last = key
    for depth, part in enumerate(outer):
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ExperimentError(
                f"{where}: --{cut('.'.join(key))} is not possible: {cut('.'.join(key[: depth + 1]))} is no table"
            )
        table = inner
    table[last] = value


def _merged(table: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """`table` with `changed` on top, table by table."""
    both = dict(table)
    for key, value in changed.items():
        old = both.get(key)
        both[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return both


def _validated(table: dict[str, Any], texts: Mapping[KeyPath, str], *, where: str) -> Experiment:
    """Validate, or raise all problems. An override that fits only as text (`--name 2024`) is taken as text."""
    error = _error(table)
    for key, text in texts.items():
        if isinstance(error, ValidationError) and _blamed(error, key):
            as_text = copy.deepcopy(table)
            _put(as_text, key, text, where=where)
            _anchor_paths(as_text, Path.cwd())
            second = _error(as_text)
            if second is None or not _blamed(second, key):
                table, error = as_text, second
    if error is None:
        return Experiment.model_validate(table)
    model = table.get("model")
    schemas = Schemas(Experiment, model_table(model.get("name")) if isinstance(model, dict) else None)
    count, lines = problems(error, schemas, frozenset(texts))
    if count == 1:
        raise ExperimentError(f"{where}: {lines[0]}")
    rest = [f"… and {count - len(lines):,} more"] if count > len(lines) else []
    raise ExperimentError("\n  ".join([f"{where}: {count:,} problems", *lines, *rest]))


def _error(table: dict[str, Any]) -> ValidationError | None:
    try:
        Experiment.model_validate(table)
    except ValidationError as error:
        return error
    return None


def _blamed(error: ValidationError, key: KeyPath) -> bool:
    return any(detail["loc"][: len(key)] == key for detail in error.errors())


def _line(key: str, value: Any) -> str:
    return f"{toml_key(key)} = {toml_value(NONE if value is None else value)}"


def _is_table(path: KeyPath) -> bool:
    """Whether a table stands at `path`, or may be left out there."""
    return Schemas(Experiment, None).at(path) is not None


def mesh_sizes(mesh: Mapping[str, int], device_count: int) -> dict[str, int]:
    """A mesh with its -1 filled in, axis -> size. Raises ExperimentError if it does not multiply to `device_count`."""
    try:
        return axis_sizes(mesh, device_count)
    except ValueError as error:
        raise ExperimentError(f"[mesh]: {error}") from None


def _equation(sizes: Mapping[str, int]) -> str:
    """`data=4 × model=2 = 8`"""
    factors = " × ".join(f"{axis}={size}" for axis, size in sizes.items())
    return f"{factors} = {math.prod(sizes.values())}" if len(sizes) > 1 else factors
