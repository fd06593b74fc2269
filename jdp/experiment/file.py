"""The validated experiment file: read it, change it from the command line, write it back, check it for the devices.

`load` makes an `Experiment` from a TOML file (its keys are in `schema/`): parse, merge the `--a.b value` overrides,
validate. One `ExperimentError` reports all problems at once. `to_toml` writes the resolved file. Checks that need the
number of devices are in `check_for_devices`. Nothing below the training loop sees an experiment.
"""

import copy
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from jdp.base.errors import UserError
from jdp.base.formatting import format_bytes
from jdp.base.toml import brief, check, cut, parse, toml_key, toml_value
from jdp.base.user_path import BUILDERS, HF, HubSource, PathError, check_regular, matching, user_path
from jdp.base.words import nearest
from jdp.core.sharding.axes import BatchUnit, axis_sizes, batch_unit
from jdp.experiment.keys import Key, Schemas, config_keys, problems, table_class, table_keys, tables
from jdp.experiment.schema.experiment import Experiment
from jdp.experiment.schema.fields import NONE
from jdp.experiment.schema.make import Made
from jdp.experiment.schema.model import TOKENIZER, MadeModel, Model, model_table, take_tokenizer
from jdp.models.configs import SIZES

KeyPath = tuple[str, ...]
MOST_BYTES = 2**20
"""Largest experiment file: a larger one was named by mistake, and a million wrong keys take a minute to report."""
PATHS = (
    *("data.source", "data.tokenizer", "data.heldout", "data.mixture.NAME.source", "eval.NAME.source"),
    *("train.init_from", "model.name"),
)
"""The keys with paths, or words; a model's name is a path after "hf:"."""


class ExperimentError(UserError):
    """A user's mistake in an experiment, its file, its data or its folder. The message has a line for each problem."""


def load(path: str | Path, overrides: Mapping[str, str] | None = None) -> Experiment:
    """Read and check an experiment file.

    Args:
        path: a TOML file, up to 1 MiB, or the name of an experiment that jdp ships, such as "quickstart". Relative
            paths in `data.source` start at the file's folder; for a shipped experiment, at the working directory.
        overrides: dotted key -> text as on a command line, such as {"train.steps": "50"}: read as a TOML value if
            that fits the key, else as text. Relative paths in an overriding `data.source` start at the working
            directory. `make` is imported only from the package given here as `plugin`.

    Raises:
        ExperimentError: the file cannot be read, is not TOML, or is not a valid experiment; or `make` names a package
            that is not `plugin` or cannot be imported.
        PathError: no file can have this path.
    """
    file = user_path(path)
    by_name = shipped_file(file)
    table = parse(copied(file.name)) if by_name else _read(file)
    _anchor_paths(table, Path.cwd() if by_name else file.parent)
    texts = {tuple(key.split(".")): text for key, text in (overrides or {}).items()}
    for key, text in texts.items():
        _put(table, key, _value(text), where=str(file))
    return _validated(table, texts, where=str(file), plugin=(overrides or {}).get("plugin"))


def from_table(table: Mapping[str, Any], *, where: str = "experiment", plugin: str | None = None) -> Experiment:
    """Check a table that is not from a file. Its relative paths stay unchanged.

    Args:
        table: the keys of an experiment file, nested as in TOML.
        where: the start of a message, in place of the file's name.
        plugin: the package that `make` in the table may import, if any.

    Raises:
        ExperimentError: the table is not a valid experiment, or names another package.
    """
    _check_limits(table, where)
    return _validated(copy.deepcopy(dict(table)), {}, where=where, plugin=plugin)


def to_toml(experiment: Experiment) -> str:
    """Return the resolved experiment as TOML with every key; `load` reads it back as an equal experiment.

    Args:
        experiment: validated.
    """
    return "\n".join(_written(experiment, ())) + "\n"


def _written(table: Mapping[str, Any] | BaseModel, path: KeyPath) -> list[str]:
    """Return the lines of a table: its keys, then its subtables, each below its heading."""
    fields = type(table).model_fields if isinstance(table, BaseModel) else {}
    items = {name: getattr(table, name) for name in fields} if isinstance(table, BaseModel) else table
    if isinstance(table, Made) and table.make is not None:
        fields, items = {}, table.written()
    inner = {key: value for key, value in items.items() if isinstance(value, BaseModel | Mapping)}
    lines = [
        f"{toml_key(key)} = {toml_value(NONE if value is None else value)}"
        for key, value in items.items()
        if key not in inner
        and not (value is None and key in fields and table_class(fields[key]))  # an omitted table is not "none"
    ]
    heading = [f"\n[{'.'.join(map(toml_key, path))}]"] if path and (lines or not inner) and items else []
    return [*heading, *lines, *(line for key, value in inner.items() for line in _written(value, (*path, key)))]


def check_for_devices(experiment: Experiment, device_count: int) -> dict[str, int]:
    """Check that the mesh and the batch fit a number of devices; return the mesh with its -1 filled in: axis -> size.

    Args:
        experiment: validated.
        device_count: number of devices in all processes together.

    Raises:
        UserError: the mesh does not multiply to `device_count`, or does not divide the batch.
    """
    sizes = mesh_sizes(experiment.mesh, device_count)
    unit = BatchUnit({**batch_unit(sizes).factors, "train.accumulate": experiment.train.accumulate})
    unit.check(experiment.train.batch_size, "train.batch_size")
    return sizes


def describe() -> list[tuple[str, list[Key]]]:
    """Return all keys of an experiment file in groups with a heading, as in `jdp train --help-all`."""
    groups = [("top level", table_keys(Experiment))]
    for path, table in tables(Experiment):
        headed = [(" ".join((table.__doc__ or "").split()), table_keys(table))]
        if table is Model:
            headed.append(("[model] with make", [key for key in table_keys(MadeModel) if key.name == "learns"]))
            for kind in {type(size): None for size in SIZES.values()}:
                sizes = ", ".join(name for name, size in SIZES.items() if isinstance(size, kind))
                headed.append((f"[model] fields of {sizes}", config_keys(kind)))
        prefix = ".".join(path)
        groups += [(title, [replace(key, name=f"{prefix}.{key.name}") for key in keys]) for title, keys in headed]
    return groups


def _read(file: Path) -> dict[str, Any]:
    try:
        check_regular(file)  # each process reads the file, and a pipe can be read only once
        if (size := file.stat().st_size) > MOST_BYTES:
            raise ExperimentError(
                f"an experiment file has at most {format_bytes(MOST_BYTES)}; {file} has {format_bytes(size)}: name the "
                "TOML file"
            )
        content = file.read_bytes()
    except FileNotFoundError:
        raise ExperimentError(f"{file}: there is no such file{missing(file)}") from None
    except IsADirectoryError:
        raise ExperimentError(f"{file} is a folder, not an experiment file{missing(file / 'x.toml')}") from None
    except OSError as error:
        raise ExperimentError(f"{file} cannot be read: {error.strerror}; name a TOML file that you may read") from None
    try:
        return parse(content.decode("utf-8-sig"))  # Windows editors write a byte order mark
    except UnicodeDecodeError:
        raise ExperimentError(f"an experiment file is TOML; {file} is not text in UTF-8: name another") from None
    except ValueError as error:
        raise ExperimentError(f"{file} {error}") from None


def _check_limits(table: Mapping[str, Any], where: str) -> None:
    """Raise ExperimentError for values that `parse` refuses, in a table from another source."""
    try:
        check(table)
    except ValueError as error:
        raise ExperimentError(f"{where} {error}") from None


def _anchor_paths(table: dict[str, Any], folder: Path) -> None:
    for path in PATHS:
        _change_paths(table, path, lambda given: str((folder / user_path(given)).absolute()))


def _change_paths(table: dict[str, Any], key: str, change: Callable[[str], str]) -> None:
    """Replace each path that a table has under one of `PATHS`."""

    def changed(path: Any, words: tuple[str, ...] = ()) -> Any:
        if isinstance(path, list | tuple):
            return [changed(each, words) for each in cast("list[Any]", path)]
        if not isinstance(path, str) or path in ("", NONE, *words):
            return path
        if hub := HubSource.of(path):
            return hub.at(changed) if hub.is_path else path
        try:
            return change(path)
        except PathError:  # the schema reports it, with its key
            return path

    def of_model(name: Any) -> Any:  # hf: is a local folder here, never a name on the hub
        return HF + changed(name.removeprefix(HF)) if str(name).startswith(HF) else name

    def visit(holder: Any, first: str, *rest: str) -> None:
        if isinstance(holder, dict):
            for key in [*holder] if first == "NAME" else [first] if first in holder else []:
                if rest:
                    visit(holder[key], *rest)
                else:
                    words = ("bytes",) if key == "tokenizer" else ("stdlib", "digits")
                    holder[key] = of_model(holder[key]) if key == "name" else changed(holder[key], words)

    visit(table, *key.split("."))


def absent_paths(table: dict[str, Any]) -> dict[str, str]:
    """Return the files, folders and globs of a table that match nothing on this machine -> their keys."""
    absent: dict[str, str] = {}
    for key in PATHS:
        paths = list[str]()
        _change_paths(copy.deepcopy(table), key, lambda path, paths=paths: paths.append(path) or path)
        for path in map(user_path, paths):
            file = path / TOKENIZER if key == "data.tokenizer" and path.is_dir() else path
            if not file.exists() and not matching(file):
                absent[str(file)] = key
    return absent


def check_paths(table: dict[str, Any]) -> None:
    """Raise ExperimentError for absent paths, with the command that a shipped experiment's comments have for them."""
    lines = list[str]()
    for path, key in absent_paths(table).items():
        fix = "fix the path"
        for command, folder in re.findall(r"# +(hf download .*--local-dir) (\S+)", "".join(map(copied, shipped()))):
            before, _, _ = f"{path}/".rpartition(f"/{folder}/")
            if before and ("--repo-type dataset" in command) == key.endswith("source"):
                fix = f"fix the path, or {command} {before}/{folder}"
        lines.append(f"{key} must be on this machine; there is no {path}: {fix}")
    if lines:
        raise ExperimentError("\n".join(lines))


def _value(text: str) -> Any:
    """Parse `text` as a TOML value or a number of Python's (.001, 1.); else return the text itself."""
    try:
        table = tomllib.loads(f"value = {text}")
        return table["value"] if len(table) == 1 else text
    except (ValueError, RecursionError):  # TOML needs a digit on both sides of a point
        return float(text) if re.fullmatch(r"[+-]?(\d+\.|\.\d+)([eE][+-]?\d+)?", text) else text


def _put(table: dict[str, Any], key: KeyPath, value: Any, *, where: str) -> None:
    """Set a dotted key and make its tables; relative paths in `value` start at the working directory."""
    changed = value
    for part in reversed(key):
        changed = {part: changed}
    _check_limits(changed, "the command line")
    _anchor_paths(changed, Path.cwd())
    *outer, last = key
    for depth, part in enumerate(outer, 1):
        if table.get(part) in (NONE, "default"):  # words in place of an empty table
            table[part] = {}
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            replaced = f"{cut('.'.join(key[:depth]))} = {brief(inner)}"
            raise ExperimentError(
                f"{where}: --{cut('.'.join(key))} is a key of a table; given {replaced}, which it would replace: "
                "remove one of the two"
            )
        table, changed = inner, changed[part]
    table[last] = _merged(table.get(last), changed[last])


def _merged(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}


def _validated(table: dict[str, Any], texts: Mapping[KeyPath, str], *, where: str, plugin: Any) -> Experiment:
    """Validate, or raise all problems as an ExperimentError.

    An override that is valid only as text (`--name 2024`) is read as text. Only the package `plugin` may be imported.
    """
    _check_plugin(table.get("plugin"), where=where, allowed=plugin)
    error = _error(table, plugin)
    for key, text in texts.items():
        if isinstance(error, ValidationError) and _blamed(error, key):
            as_text = copy.deepcopy(table)
            _put(as_text, key, text, where=where)
            second = _error(as_text, plugin)
            if second is None or not _blamed(second, key):
                table, error = as_text, second
    if error is None:
        take_tokenizer(table)
        return Experiment.model_validate(table, context=plugin)
    schemas = Schemas(Experiment, model_table(table.get("model")) or Model)
    count, lines = problems(error, schemas, frozenset(texts))
    if count == 1:
        raise ExperimentError(f"{where}: {lines[0]}")
    more = [f"… and {count - len(lines):,} more"] if count > len(lines) else []
    raise ExperimentError("\n  ".join([f"{where}: {count:,} problems", *lines, *more]))


def _check_plugin(name: Any, *, where: str, allowed: Any) -> None:
    if name in (None, NONE) or not isinstance(name, str):  # the schema reports anything but text
        return
    if name != allowed:
        raise ExperimentError(
            f"{where}: a plug-in is code, which an experiment file alone does not run; given plugin = {brief(name)} "
            f"without --plugin: add --plugin {cut(name)} if you trust it, or remove the key"
        )
    top = name.partition(".")[0]
    if top.isidentifier() and not iskeyword(top) and find_spec(top) is None:  # else the schema reports it
        fix = "install it (pip install -e FOLDER), or name the folder that holds it in PYTHONPATH"
        raise ExperimentError(f"{where}: --plugin names a package that Python finds; given {brief(name)}: {fix}")


def _error(table: dict[str, Any], plugin: Any) -> ValidationError | None:
    try:
        Experiment.model_validate(table, context=plugin)
    except ValidationError as error:
        return error
    return None


def _blamed(error: ValidationError, key: KeyPath) -> bool:
    return any(detail["loc"][: len(key)] == key for detail in error.errors())


def mesh_sizes(mesh: Mapping[str, int], device_count: int) -> dict[str, int]:
    """Return [mesh] with its -1 filled in.

    Args:
        mesh: axis -> size; one may be -1.
        device_count: devices of all processes together.

    Raises:
        ExperimentError: the sizes do not multiply to `device_count`.
    """
    try:
        return axis_sizes(mesh, device_count)
    except ValueError as error:
        raise ExperimentError(f"[mesh]: {error}") from None


# The experiments that jdp ships, by name. In a clone their files are `experiments/*.toml`; in a wheel they are in
# `shipped_files/` beside this module.

_INSTALLED = Path(__file__).parent / "shipped_files"
_CLONED = Path(__file__).parents[2] / "experiments"


def shipped() -> dict[str, Path]:
    """Return name -> file of each experiment that jdp ships, sorted by name."""
    folder = _INSTALLED if _INSTALLED.is_dir() else _CLONED
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def shipped_file(path: Path) -> Path | None:
    """Return the file of a shipped experiment if `path` is its name and does not exist; else None."""
    return None if os.path.lexists(path) else shipped().get(str(path))


def copied(start: str, name: str | None = None) -> str:
    """Return the text of a shipped experiment, with paths that start at the working directory, perhaps renamed."""
    text = shipped()[start].read_text(encoding="utf-8")
    text = re.sub(rf'"(hf:(?:(?:{"|".join(BUILDERS)}):)?)?\.\./', r'"\1', text)  # "../runs/a" becomes "runs/a"
    if name is None:
        return text
    text = text.replace(f"experiments/{start}.toml", f"{name}.toml")
    return re.sub(r'^name = ".*"$', f'name = "{name}"', text, count=1, flags=re.MULTILINE)


def missing(path: Path) -> str:
    """Return the end of the message about a missing experiment: the nearest file, or the files in the folder."""
    here = sorted(file.name for file in path.parent.glob("*.toml"))
    names = shipped()
    if path.suffix or path.parent != Path():  # not the name of a shipped experiment
        near = nearest(path.name, here, f"; did you mean {path.parent}/", cutoff=0.4)
        if not near and path.stem in names:
            return f"; jdp ships one: write {path.stem}"
        nearby = f"; near it: {', '.join(str(path.parent / name) for name in here[:5])}" if here else ""
        return near or nearby or ("" if path.parent.is_dir() else f", nor a folder {path.parent}")
    listed = f"jdp ships {', '.join(names) or 'none in this copy'}"
    near = nearest(path.name, [*names, *here], cutoff=0.6)
    return f"{near} {listed}" if near else f"; {listed}: write one of these names, or a TOML file's"
