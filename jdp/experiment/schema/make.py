"""User functions in an experiment file: `make = "package.module:function"`, and its keywords beside it.

A file alone imports nothing: the package must be named on the command line, `--plugin package`. The keywords are
compared with the function's signature before anything runs.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, ModelWrapValidatorHandler, PrivateAttr, ValidationInfo, model_validator

from jdp.base.errors import UserError, is_users
from jdp.base.machine import jax_has_started
from jdp.base.toml import cut
from jdp.base.words import nearest
from jdp.experiment.schema.fields import NONE, Section, package_name

_MOST_LINES, _MOST_FRAMES = 14, 3
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class MakeError(UserError):
    """A function in an experiment file cannot be imported, or does not take the given keywords."""


class SampleError(MakeError):
    """A user's data raised an exception for a sample, perhaps only now: `jdp launch` starts again."""

    exit_code = 70


def function_of(make: str) -> Callable[..., Any]:
    """Import the function of "package.module:function"; only for a package that the user named."""
    name, _, attribute = make.partition(":")
    started = jax_has_started()
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # any error is the package's
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise MakeError(
                f"make names a package that Python finds; given {make}, and there is no {error.name}. Install it "
                "(pip install -e FOLDER), or name the folder that holds it in PYTHONPATH"
            ) from None
        raise MakeError(f"{name} does not import; its own error:\n{users_traceback(error)}") from None
    if jax_has_started() and not started:
        raise MakeError(
            f"{name} starts JAX when it is imported, before processes and devices are chosen. Move that into its "
            "functions, or use NumPy"
        )
    function = getattr(module, attribute, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise MakeError(f"{name} has no function {cut(attribute)}{nearest(attribute, public)}")
    return function


def check_keywords(make: str, arguments: Sequence[str], keywords: Mapping[str, Any], plugin: str | None) -> None:
    """Check that a function is in the package of --plugin, and takes these keywords after jdp's arguments."""
    package = make.partition(":")[0].partition(".")[0]
    if package != plugin:
        raise MakeError(
            f"make = {cut(repr(make))} is code, which an experiment file alone does not run. Add --plugin {package} if "
            "you trust it"
        )
    parameters = _parameters(make, arguments)
    known = [name for name, each in parameters.items() if each.kind in _NAMED]
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for key in keywords:
        if key not in known and not takes_all:
            hint = nearest(key, known) or f"; its keywords are {', '.join(known) or 'none'}"
            raise MakeError(f"{make} has no keyword {cut(key)}{hint}")
    missing = [name for name in known if parameters[name].default is inspect.Parameter.empty and name not in keywords]
    if missing:
        raise MakeError(f"{make} needs {', '.join(missing)}: add {missing[0]} = … beside make")


def with_defaults(make: str, arguments: Sequence[str], keywords: Mapping[str, Any]) -> dict[str, Any]:
    parameters = _parameters(make, arguments).items()
    defaults = {name: each.default for name, each in parameters if each.default is not inspect.Parameter.empty}
    return {**defaults, **keywords}


def folder_of(plugin: str | None) -> Path | None:
    """Return the folder or file of an imported package; None if it has neither."""
    file = getattr(sys.modules.get(plugin or ""), "__file__", None)
    if file is None:
        return None
    return Path(file).parent if Path(file).name == "__init__.py" else Path(file)


def _parameters(make: str, arguments: Sequence[str]) -> dict[str, inspect.Parameter]:
    """Return a function's parameters after jdp's arguments. Raises MakeError if it takes fewer."""
    function = function_of(make)
    try:
        every = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        raise MakeError(f"{make} has no signature that Python can read. Wrap it in a function") from None
    positional = [name for name, each in every.items() if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    takes_any = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in every.values())
    if len(positional) < len(arguments) and not takes_any:
        raise MakeError(f"{make} must take {', '.join(arguments)} first; it takes {', '.join(every) or 'nothing'}")
    return {name: each for name, each in every.items() if name not in positional[: len(arguments)]}


def users_traceback(error: BaseException) -> str:
    """Return the last lines of a traceback in the user's code, not in jdp, Python or installed packages."""
    walked = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_users(frame)]
    frames = traceback.StackSummary.extract(iter(walked[-_MOST_FRAMES:])).format()
    said = "".join([*frames, *traceback.format_exception_only(error)]).splitlines()
    lines = [line for line in said if "has removed its internal frames" not in line and line.strip("-")]  # JAX's note
    return "\n".join(f"  {line}" for line in lines[-_MOST_LINES:])


def _function_name(make: str) -> str:
    module, _, function = make.partition(":")
    if not re.fullmatch(r"[A-Za-z_]\w{0,99}", function):
        raise UserError('must be "package.module:function"')
    package_name(module)
    return make


class Made(Section):
    """A table with jdp's own keys; or with `make`, the keys of `_shared`, and the function's keywords."""

    make: Annotated[str, AfterValidator(_function_name)] | None = None
    """"package.module:function": your function in place of jdp's; the other keys of the table are its keywords. The
    package is imported only if --plugin names it on the command line."""

    _shared: ClassVar[tuple[str, ...]] = ()
    """jdp's keys that the table may have beside `make`."""
    _arguments: ClassVar[tuple[str, ...]] = ()
    """Names of the arguments that jdp passes by position."""
    _keywords: dict[str, Any] = PrivateAttr(default_factory=dict[str, Any])

    @model_validator(mode="wrap")
    @classmethod
    def _take_keywords(cls, table: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        if not isinstance(table, Mapping) or table.get("make") in (None, NONE):
            return handler(table)
        given: Mapping[str, Any] = table
        own = ("make", *cls._shared)
        made = handler({key: value for key, value in given.items() if key in own})
        keywords = {key: None if value == NONE else value for key, value in given.items() if key not in own}
        assert made.make is not None
        check_keywords(made.make, cls._arguments, keywords, info.context)
        made._keywords.update(keywords)
        return made

    @property
    def keywords(self) -> dict[str, Any]:
        """The function's keywords, as in the file."""
        return self._keywords

    def call(self, *arguments: Any) -> Any:
        """Call the function. Raises MakeError, with the user's own lines, if it raises an exception."""
        assert self.make is not None
        try:
            return function_of(self.make)(*arguments, **self.keywords)
        except Exception as error:
            raise MakeError(f"{self.make} raised an exception:\n{users_traceback(error)}") from None

    def written(self) -> dict[str, Any]:
        """Return the keys of a table with `make`, as they are in the file."""
        return {key: getattr(self, key) for key in ("make", *self._shared)} | self.keywords
