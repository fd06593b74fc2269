"""The validated experiment file: read it, change it from the command line, write it back, hold it against the devices.

`load` goes from a TOML file to an `Experiment` (its keys are in `schema.py`): parse, lay the `--a.b value` overrides on
top, validate; all problems are said at once, as one `ExperimentError`. `to_toml` writes it as resolved. What needs the
number of devices waits for `check_for_devices`. The last part makes what needs nothing else: the learning rate and the
optimizer. Nothing below the training loop ever sees an experiment.
"""

import copy
import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from pydantic import BaseModel, ValidationError

from jdp.mesh import DATA, REPLICA
from jdp.models.sizes import SIZES
from jdp.plan import nearest_sizes
from jdp.schema import NONE, Experiment, Model, model_table
from jdp.wording import Key, Schemas, config_keys, problems, table_keys, toml_value

KeyPath = tuple[str, ...]
NOT_DECAYED = ("bias", "scale")
"""Last part of the paths of parameters that weight decay leaves alone."""


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
    file = Path(path)
    table = _read(file)
    _anchor_source(table, file.parent)
    texts = {tuple(key.split(".")): text for key, text in (overrides or {}).items()}
    changed: dict[str, Any] = {}
    for key, text in texts.items():
        _put(changed, key, _value(text), where=str(file))
    _anchor_source(changed, Path.cwd())
    return _validated(_merged(table, changed), texts, where=str(file))


def from_table(table: Mapping[str, Any], *, where: str = "experiment") -> Experiment:
    """Check a table that did not come from a file. Raises ExperimentError as `load` does; paths stay as they are."""
    return _validated(copy.deepcopy(dict(table)), {}, where=where)


def to_toml(experiment: Experiment) -> str:
    """The experiment as resolved, every key written; `load` reads it back as an equal one."""
    top: list[str] = []
    tables: list[str] = []
    for key in type(experiment).model_fields:
        value = getattr(experiment, key)
        if isinstance(value, BaseModel):
            items = [(name, getattr(value, name)) for name in type(value).model_fields]
            tables.append("\n".join([f"\n[{key}]", *(_line(name, item) for name, item in items)]))
        elif isinstance(value, dict):
            tables.append("\n".join([f"\n[{key}]", *(_line(name, item) for name, item in value.items())]))
        elif not _is_table(key):
            top.append(_line(key, value))
    return "\n".join([*top, *tables]) + "\n"


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
    for name in Experiment.model_fields:
        table = Schemas(Experiment, Model).at((name,))
        if table:
            groups.append((table.__doc__ or "", [replace(key, name=f"{name}.{key.name}") for key in table_keys(table)]))
        if table is Model:
            for kind in {type(size): None for size in SIZES.values()}:
                sizes = ", ".join(name for name, size in SIZES.items() if isinstance(size, kind))
                keys = [replace(key, name=f"{name}.{key.name}") for key in config_keys(kind)]
                groups.append((f"[model] fields of {sizes}", keys))
    return groups


def learning_rate(experiment: Experiment) -> optax.Schedule:
    """Learning rate as a function of the optimizer steps done before (0 at the first step).

    Warm-up: (count + 1) / warmup_steps of `lr`, so the first step already moves and the last of the warm-up has `lr`.
    Then constant, or down to `final_lr_fraction` at the end of the run: along a line, or half a cosine
    (arXiv:1608.03983, eq. 5, without restarts). Steps are global: accumulation and device count do not change them.
    """
    settings, steps = experiment.optimizer, experiment.train.steps
    warmup = settings.warmup_steps
    rest = max(steps - warmup, 1)
    if settings.schedule == "cosine":
        after = optax.cosine_decay_schedule(settings.lr, rest, alpha=settings.final_lr_fraction)
    elif settings.schedule == "linear":
        after = optax.linear_schedule(settings.lr, settings.lr * settings.final_lr_fraction, rest)
    else:
        after = optax.constant_schedule(settings.lr)

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        rising = settings.lr * (jnp.asarray(count, jnp.float32) + 1) / max(warmup, 1)
        return jnp.where(jnp.asarray(count) < warmup, rising, after(jnp.maximum(jnp.asarray(count) - warmup, 0)))

    return rate


def optimizer(experiment: Experiment) -> optax.GradientTransformation:
    """The optimizer the file asks for; its state counts steps for the learning rate.

    Clipping is not in it: the step clips, as it knows the norm over all devices. Weight decay is decoupled and leaves
    out biases and norm scales by name: by number of dims one cannot tell, as the scales of stacked layers have two.
    """
    chosen, rate = experiment.optimizer, learning_rate(experiment)
    decay: dict[str, Any] = {"weight_decay": chosen.weight_decay, "mask": decay_mask}
    match chosen.name:
        case "adamw":
            return optax.adamw(rate, b1=chosen.b1, b2=chosen.b2, eps=chosen.eps, **decay)
        case "adam":
            return optax.adam(rate, b1=chosen.b1, b2=chosen.b2, eps=chosen.eps)
        case "lion":
            return optax.lion(rate, b1=chosen.b1, b2=chosen.b2, **decay)
        case "sgd":
            step = optax.trace(chosen.momentum) if chosen.momentum else optax.identity()
            return optax.chain(step, optax.add_decayed_weights(**decay), optax.scale_by_learning_rate(rate))


def decay_mask(params: Any) -> Any:
    """Which parameters weight decay applies to: a tree of bools, False where the last key is `bias` or `scale`."""

    def decays(path: Any, _: Any) -> bool:
        return jax.tree_util.keystr(path[-1:], simple=True) not in NOT_DECAYED

    return jax.tree_util.tree_map_with_path(decays, params)


def _read(file: Path) -> dict[str, Any]:
    """The file's table, or what is wrong with the file."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ExperimentError(f"{file}: there is no such file{_files_nearby(file)}") from None
    except IsADirectoryError:
        raise ExperimentError(f"{file} is a folder, not an experiment file{_files_nearby(file / 'x')}") from None
    except UnicodeDecodeError:
        raise ExperimentError(f"{file} is not text in UTF-8; an experiment file is TOML") from None
    except tomllib.TOMLDecodeError as error:
        raise ExperimentError(f"{file} is not valid TOML: {error}") from None
    except OSError as error:
        raise ExperimentError(f"{file} cannot be read: {error.strerror}") from None


def _files_nearby(file: Path) -> str:
    """The experiment files in the same folder, those with a similar name first."""
    names = sorted(path.name for path in file.parent.glob("*.toml"))
    if not names:
        return "" if file.parent.is_dir() else f", nor a folder {file.parent}"
    alike = difflib.get_close_matches(file.name, names, n=3, cutoff=0.4)
    return f"; near it: {', '.join(str(file.parent / name) for name in alike or names[:5])}"


def _anchor_source(table: dict[str, Any], folder: Path) -> None:
    """Make the relative paths in `data.source` start at `folder`."""
    data = table.get("data")
    if not isinstance(data, dict) or "source" not in data:
        return

    def anchored(source: Any) -> Any:
        if not isinstance(source, str) or source in ("stdlib", ""):
            return source
        return str((folder / Path(source).expanduser()).absolute())

    source = data["source"]
    data["source"] = [anchored(item) for item in source] if isinstance(source, list) else anchored(source)


def _value(text: str) -> Any:
    """What `text` means as a TOML value; the text itself where it means nothing."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if len(table) == 1 else text


def _put(table: dict[str, Any], key: KeyPath, value: Any, *, where: str) -> None:
    """Set a dotted key, making tables on the way."""
    *outer, last = key
    for depth, part in enumerate(outer):
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ExperimentError(
                f"{where}: --{'.'.join(key)} is not possible: {'.'.join(key[: depth + 1])} is no table"
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
            _anchor_source(as_text, Path.cwd())
            second = _error(as_text)
            if second is None or not _blamed(second, key):
                table, error = as_text, second
    if error is None:
        return Experiment.model_validate(table)
    model = table.get("model")
    size = model.get("name") if isinstance(model, dict) else None
    schemas = Schemas(Experiment, model_table(size) if isinstance(size, str) and size in SIZES else None)
    lines = problems(error, schemas, frozenset(texts))
    if len(lines) == 1:
        raise ExperimentError(f"{where}: {lines[0]}")
    raise ExperimentError("\n  ".join([f"{where}: {len(lines)} problems", *lines]))


def _error(table: dict[str, Any]) -> ValidationError | None:
    try:
        Experiment.model_validate(table)
    except ValidationError as error:
        return error
    return None


def _blamed(error: ValidationError, key: KeyPath) -> bool:
    return any(detail["loc"][: len(key)] == key for detail in error.errors())


def _line(key: str, value: Any) -> str:
    return f"{key} = {toml_value(NONE if value is None else value)}"


def _is_table(key: str) -> bool:
    """Whether `key` is a table that may be left out."""
    return Schemas(Experiment, None).at((key,)) is not None


def mesh_sizes(mesh: Mapping[str, int], device_count: int) -> dict[str, int]:
    """A mesh with its -1 filled in, axis -> size. Raises ExperimentError if it does not multiply to `device_count`."""
    known = math.prod(size for size in mesh.values() if size != -1)
    sizes = {axis: device_count // known if size == -1 else size for axis, size in mesh.items()}
    if math.prod(sizes.values()) == device_count:
        return sizes
    run = f"run on {known} devices (on CPU: --devices {known})"
    if -1 in mesh.values():
        fixed = {axis: size for axis, size in mesh.items() if size != -1}
        raise ExperimentError(
            f"mesh {_equation(fixed)} must divide the number of devices, but there are {device_count} devices: "
            f"change an axis, or {run} or a multiple of it"
        )
    others = known // mesh[DATA]
    fits = f"take --mesh.data {device_count // others}, " if device_count % others == 0 else ""
    raise ExperimentError(
        f"mesh {_equation(mesh)}, but there are {device_count} devices: {fits}change an axis, or {run}"
    )


def _equation(sizes: Mapping[str, int]) -> str:
    """`data=4 × model=2 = 8`"""
    factors = " × ".join(f"{axis}={size}" for axis, size in sizes.items())
    return f"{factors} = {math.prod(sizes.values())}" if len(sizes) > 1 else factors
