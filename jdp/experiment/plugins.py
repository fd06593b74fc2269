"""Plug-ins: your package registers models, data sets, losses and optimizers, which experiment files then name.

`jdp train FILE --plugin my_package` imports my_package, which calls these functions as decorators. An experiment file
alone imports nothing: its `plugin` counts only with the flag.
"""

import contextlib
import dataclasses
import importlib
import re
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jdp.base.machine import jax_has_started
from jdp.base.shorten import brief, cut
from jdp.experiment.schema.chosen import TABLES
from jdp.experiment.schema.data import DATASETS
from jdp.experiment.schema.experiment import Experiment
from jdp.experiment.schema.fields import NONE, package_name
from jdp.experiment.schema.model import MODELS
from jdp.experiment.schema.optimizer import LOSSES, OPTIMIZERS
from jdp.experiment.schema.registered import Entry, Learns, Table, hints_of, is_plain

Made = TypeVar("Made", bound=Callable[..., Any])
NEEDED: dict[Learns, tuple[str, ...]] = {
    "text": ("vocab_size", "context"),
    "images": ("image_size", "channels", "classes"),
    "features": ("features_in", "features_out"),
}
"""What a model learns -> the fields that jdp's data is compared with."""
_PACKAGE = Path(__file__).parents[1]  # as jdp.base.tree_paths has it, which imports JAX
_MOST_LINES, _MOST_FRAMES = 14, 3
_importing: list[str] = []


class PluginError(ValueError):
    """A plug-in registers something that jdp cannot use."""


@dataclasses.dataclass(frozen=True)
class NoFields:
    """An entry without fields."""


def register_model(name: str, fields: Any = NoFields, *, learns: Learns | None = None) -> Callable[[Made], Made]:
    """Register a model: `[model] name = NAME`, with the fields beside it.

    jdp calls the decorated function as `make(fields, rngs)`, under `jit`, with an instance of the dataclass and an
    `nnx.Rngs`; `rngs.params()` is a key. It returns an `nnx.Module`, or any pytree of arrays.

    Args:
        name: letters, digits, dots, dashes and underscores.
        fields: a dataclass, whose fields are int, float, bool, str, words (`Literal`), tuples of one of these of any
            length, or None; or an instance, whose values are the defaults. Its docstring may describe them below
            `Fields:`, one `name: text` a line, and its `__post_init__` may refuse values with a ValueError.
        learns: the kind of jdp's own data and loss that it uses. "text": as a GPT, with a method `loss` and the fields
            vocab_size and context. "images": as a ResNet, with image_size, channels and classes. "features": as an MLP,
            with features_in and features_out. None: `data.name` and `loss.name` are a plug-in's.

    Raises:
        PluginError: a name that is taken or cannot be, fields that are no dataclass or that TOML cannot hold, or that
            lack what `learns` needs.
    """
    if learns is not None and learns not in NEEDED:
        raise PluginError(f"learns is one of {', '.join(NEEDED)}, or None; given {learns!r} for {name!r}: fix it")
    register = _registrar(MODELS, name, fields, learns=learns)
    has = {each.name for each in dataclasses.fields(fields)}
    if learns and (missing := [key for key in NEEDED[learns] if key not in has]):
        raise PluginError(f"a model that learns {learns} has {', '.join(missing)}; given {name!r} without: add it")
    return register


def register_dataset(name: str, fields: Any = NoFields) -> Callable[[Made], Made]:
    """Register a data set: `[data] name = NAME`, with the fields beside it.

    jdp calls the decorated function as `make(fields)`, the same on every process. It returns the samples: an object
    with `len` and `[index]`. A sample is a dict of arrays, with the same shapes and dtypes for all; several threads may
    read. jdp shuffles the samples anew each epoch, gives each process its rows, and resumes. From one object jdp holds
    out `data.heldout_fraction`, by a hash of each sample's content, and reads all samples once for it. A pair of
    objects is the training side and the held-out side. A sample without "weights" counts 1.

    Args:
        name: as for `register_model`.
        fields: as for `register_model`.

    Raises:
        PluginError: as for `register_model`.
    """
    return _registrar(DATASETS, name, fields)


def register_loss(name: str, fields: Any = NoFields, *, metrics: Sequence[str] = ()) -> Callable[[Made], Made]:
    """Register a loss: `[loss] name = NAME`, with the fields beside it.

    jdp calls the decorated function as `loss(fields, model, batch, rng)`. It returns a `jdp.Loss`: sums over the rows
    of the batch. Rows that only fill the batch have "weights" 0. `rng` is None in evaluations.

    Args:
        name: as for `register_model`.
        fields: as for `register_model`.
        metrics: names in `jdp.Loss.metrics`, by which a run may stop early and keep its best checkpoint. One that ends
            in "accuracy" is better when it is larger.

    Raises:
        PluginError: as for `register_model`.
    """
    return _registrar(LOSSES, name, fields, metrics=tuple(metrics))


def register_optimizer(name: str, fields: Any = NoFields) -> Callable[[Made], Made]:
    """Register an optimizer: `[optimizer] name = NAME`, with the fields beside it.

    jdp calls the decorated function as `make(fields, schedule)`. `schedule` is the learning rate as a function of the
    steps done (`optimizer.lr`, `warmup_steps`, `schedule`). It returns an `optax.GradientTransformation`, which need
    not clip or average: `clip_norm` and `ema_decay` are keys of every optimizer.

    Args:
        name: as for `register_model`.
        fields: as for `register_model`; not called as a key that every optimizer has.

    Raises:
        PluginError: as for `register_model`.
    """
    return _registrar(OPTIMIZERS, name, fields)


def _registrar(table: Table, name: Any, fields: Any, **more: Any) -> Callable[[Made], Made]:
    """Return the decorator that adds an entry to a table. Raises PluginError."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name) or name == NONE:
        raise PluginError(
            f"{table.key}.name is letters, digits, dots, dashes and underscores, up to 100, and not none; given "
            f"{brief(name) if isinstance(name, str) else repr(name)}: choose another"
        )
    _check_fields(table, name, fields)

    def register(make: Made) -> Made:
        if not callable(make):
            raise PluginError(f"{table.key}.name = {name!r} is a function's; given {make!r}: decorate a function")
        if name in (*table.own, *table.entries):
            entry = table.entries.get(name)
            holder = entry.by if entry and entry.by else "jdp itself"
            raise PluginError(f"{table.key}.name = {name!r} must be new; given one that {holder} has: choose another")
        by = _importing[-1] if _importing else make.__module__
        table.entries[name] = Entry(name, fields, make, by, **more)
        return make

    return register


def _check_fields(table: Table, name: str, fields: Any) -> None:
    """Raise PluginError unless this is a dataclass whose fields can be keys of the table."""
    if not dataclasses.is_dataclass(fields):
        raise PluginError(f"the fields of {table.key} {name!r} are a dataclass; given {fields!r}: add @dataclass")
    try:
        hints = hints_of(fields if isinstance(fields, type) else type(fields))
    except Exception as error:  # a hint is evaluated, which may raise anything
        raise PluginError(f"the fields of {table.key} {name!r} have types that are not there: {error}") from None
    for each in dataclasses.fields(fields):
        if each.name in table.reserved:
            raise PluginError(f"{table.key}.{each.name} is jdp's own key; given as a field of {name!r}: rename it")
        if not is_plain(hints[each.name]):
            raise PluginError(
                f"a field is int, float, bool, str, Literal words, tuple[one of these, ...] or None; given "
                f"{each.name}: {cut(str(each.type))} of {table.key} {name!r}: change it"
            )


def use(name: str) -> None:
    """Import a plug-in. Call it only with a name that the user gave on the command line or in a program."""
    try:
        package_name(name)
    except ValueError as error:
        raise PluginError(f"plugin {error}; given {brief(name)}") from None
    started = jax_has_started()
    with _registering(name):
        try:
            importlib.import_module(name)
        except PluginError as error:
            raise PluginError(f"plug-in {name}: {error}") from None
        except (Exception, SystemExit) as error:  # whatever it is, it is the plug-in's
            if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
                raise PluginError(
                    f"a plug-in must be a package that Python finds; given {name}, and there is no {error.name}: "
                    "install it (pip install -e FOLDER), or name the folder that holds it in PYTHONPATH"
                ) from None
            raise PluginError(f"plug-in {name} does not import; its own error:\n{_own_traceback(error)}") from None
        if jax_has_started() and not started:
            raise PluginError(
                "a plug-in must compute nothing with JAX when it is imported, as processes and devices are not chosen "
                f"yet; given {name}, which starts JAX: move that into the functions that it registers, or use NumPy"
            )
        if not any(entry.registered_by(name) for table in TABLES for entry in table.entries.values()):
            raise PluginError(
                f"a plug-in must register something when it is imported; given {name}, which does not: call "
                "jdp.plugin.register_model, register_dataset, register_loss or register_optimizer in it"
            )


@contextlib.contextmanager
def _registering(name: str) -> Generator[None]:
    """Note the plug-in that registers; if its import fails, drop its entries."""
    before = [dict(table.entries) for table in TABLES]
    _importing.append(name)
    try:
        yield
    except BaseException:
        for table, entries in zip(TABLES, before, strict=True):
            table.entries.clear()
            table.entries.update(entries)
        raise
    finally:
        _importing.pop()


def _own_traceback(error: BaseException) -> str:
    """Return the last lines of a traceback, without the frames of jdp and of Python's import system."""
    own = error.__traceback__
    while own is not None and _is_not_its_own(own.tb_frame.f_code.co_filename):
        own = own.tb_next
    lines = "".join(traceback.format_exception(type(error), error, own, limit=-_MOST_FRAMES)).splitlines()
    return "\n".join(f"  {line}" for line in lines[-_MOST_LINES:])


def _is_not_its_own(file: str) -> bool:
    return file.startswith("<frozen importlib") or file == importlib.__file__ or Path(file).is_relative_to(_PACKAGE)


def names_used(experiment: Experiment) -> dict[str, str]:
    """Return table -> name of each entry that an experiment uses from its plug-in."""
    named = {table.key: (table.entries.get(getattr(experiment, table.key).name)) for table in TABLES}
    return {key: entry.name for key, entry in named.items() if entry and entry.by}


def folder_of(plugin: str | None) -> Path | None:
    """Return the folder, or the file, of a plug-in that was imported; None where there is none."""
    file = getattr(sys.modules.get(plugin or ""), "__file__", None)
    if file is None:
        return None
    return Path(file).parent if Path(file).name == "__init__.py" else Path(file)
