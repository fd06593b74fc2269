"""The kinds of value in an experiment file, and the base of all its tables."""

import keyword
import re
import struct
import typing
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, model_validator

from jdp.base.errors import UserError
from jdp.base.toml import cut
from jdp.base.user_path import HubSource, bucket_address, user_path
from jdp.base.words import CompilerPreset
from jdp.core.compiling.options import Compiler

NONE = "none"
"""Means None, which TOML does not have: `clip_norm = "none"`."""

ALL = "all"
"""Means no limit: `eval_batches = "all"`."""

_MOST_SINGLE, _LEAST_SINGLE = (2 - 2**-23) * 2.0**127, 2.0**-126
_PATTERN = 'must be a path pattern, such as "*/lora_*"'
_MOST_INT = 2**31 - 1
"""Largest int32: counters and sizes on devices are int32."""


def run_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._=-]{1,200}", name) or name in (".", ".."):  # file systems take 255 bytes
        rule = "must be letters, digits, dots, dashes and underscores, up to 200"
        raise UserError(f"{rule}, because it names the run's folder")
    return name


def package_name(name: str) -> str:
    """Check that Python can import a package of this name. Raises ValueError."""
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")) or len(name) > 200:
        hint = f" (did you mean {other}?)" if (other := name.replace("-", "_")) != name and other.isidentifier() else ""
        raise UserError(f"must be the name by which Python imports a package, such as my_package{hint}")
    return name


def _path(path: str) -> str:
    """Return a possible path (a word such as "stdlib" too). Raises PathError."""
    user_path(path)
    return _require(path, path != "", "must have a character at least: write a path")


def _require(value: Any, is_valid: bool, rule: str) -> Any:
    if not is_valid:
        raise UserError(rule)
    return value


def _single(value: float) -> float:
    """Return the number if it is finite, non-zero and below 1 in float32 as it is in float64. Raises ValueError."""
    if value and not _LEAST_SINGLE <= abs(value) <= _MOST_SINGLE:
        limits = f"from {_LEAST_SINGLE:.4g} to {_MOST_SINGLE:.4g}"
        raise UserError(f"must be 0, or a number of 32 bits, as devices compute, {limits}")
    if value < 1 <= struct.unpack("f", struct.pack("f", value))[0]:
        raise UserError("must be less than 1 in the 32 bits that devices compute in, at most 0.99999994")
    return value


def _words(value: Any, rule: str) -> Any:
    """Return text, a tuple of texts, or None. Raises ValueError with the rule for anything else."""
    words = value if isinstance(value, list | tuple) else (value,)
    if value is not None and not (words and all(isinstance(word, str) and word for word in words)):
        raise UserError(f"{rule}, or an array of them, as text in quotes")
    return tuple(words) if isinstance(value, list | tuple) else value


def words_of(words: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the value of a key that is text, an array of texts, or none, as a tuple."""
    return (words,) if isinstance(words, str) else words or ()


def _source(source: Any) -> Any:
    source = _words(source, 'must be "stdlib", a path or glob, "hf:NAME", for images "digits"')
    for word in words_of(source):
        hub = HubSource.of(word)
        if hub is not None and (why := hub.no_builder):
            raise UserError(why)
        if hub is None or hub.is_path:
            user_path(word if hub is None else hub.path)
    return source


def _prompts(prompts: Any) -> Any:
    prompts = _words("" if prompts is None else prompts, "must be text of one character at least")
    for prompt in words_of(prompts):
        if prompt.encode(errors="replace").decode() != prompt:
            raise UserError("must be text in UTF-8")
    return prompts


def _rule(entries: Any) -> Any:
    """Return a rule as tuples: ["", "model", ["data", "model"]] is ("", "model", ("data", "model"))."""
    given = list(entries) if isinstance(entries, list | tuple) else [None]
    rule = tuple(tuple(entry) if isinstance(entry, list | tuple) else entry for entry in given)
    for entry in rule:
        if not all(isinstance(axis, str) for axis in (entry if isinstance(entry, tuple) else (entry,))):
            raise UserError('must be an array with a mesh axis for each dimension ("" = none), such as ["", "model"]')
    return rule


_WHOLE = f"must be at most {_MOST_INT}, the largest whole number of 32 bits"
_BATCHES = f'must be 1 or more, or "{ALL}"'
_BEST = "must be true, false, or a metric of the evaluations, in quotes"
_BOOL_OR_AUTO = 'must be true, false, or "auto", which leaves it to jdp'

Whole = AfterValidator(lambda value: _require(value, abs(value) <= _MOST_INT, _WHOLE))
Single = AfterValidator(_single)
Positive = Annotated[int, Field(ge=1), Whole]
AboveZero = Annotated[float, Field(gt=0), Single]
Count = Annotated[int, Field(ge=0), Whole]
Fraction = Annotated[float, Field(ge=0, le=1), Single]
Part = Annotated[float, Field(gt=0, lt=1), Single]
Decay = Annotated[float, Field(ge=0, lt=1), Single]
PathText = Annotated[str, AfterValidator(_path)]
Address = Annotated[str, AfterValidator(bucket_address)]
PackageName = Annotated[str, AfterValidator(package_name)]
RunName = Annotated[str, AfterValidator(run_name)]
Source = Annotated[str | tuple[str, ...], PlainValidator(_source)]
MaybeSource = Annotated[str | tuple[str, ...] | None, PlainValidator(_source)]
Patterns = Annotated[str | tuple[str, ...] | None, PlainValidator(lambda value: _words(value, _PATTERN))]
Prompts = Annotated[str | tuple[str, ...], PlainValidator(_prompts)]
Batches = Annotated[
    int | typing.Literal["all"],
    PlainValidator(lambda value: _require(value, value == ALL or (type(value) is int and value >= 1), _BATCHES)),
]
Best = Annotated[
    bool | str, PlainValidator(lambda value: _require(value, isinstance(value, bool | str) and value != "", _BEST))
]
BoolOrAuto = Annotated[
    bool | typing.Literal["auto"],
    PlainValidator(lambda value: _require(value, value == "auto" or isinstance(value, bool), _BOOL_OR_AUTO)),
]
CompilerTable = Annotated[CompilerPreset | dict[str, Any], PlainValidator(lambda value: Compiler.of(value).value)]
Rule = Annotated[tuple[str | tuple[str, ...], ...], PlainValidator(_rule)]


class Section(BaseModel):
    """A table of the file: no unknown keys, nothing converted, nothing changed afterwards."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _from_toml(cls, table: Any) -> Any:
        """Read `"none"` as None if the field allows it, because TOML has no null; and arrays as tuples."""
        if not isinstance(table, Mapping):
            return table
        return {key: cls._value(key, value) for key, value in table.items()}

    @classmethod
    def _value(cls, key: str, value: Any) -> Any:
        if value == NONE and key in cls.model_fields:
            return None if type(None) in typing.get_args(cls.model_fields[key].annotation) else value
        return tuple(value) if isinstance(value, list) else value


def named(kind: str) -> AfterValidator:
    """Check the names of a field's subtables, such as [eval.NAME]."""

    def check(table: Mapping[str, Any]) -> Mapping[str, Any]:
        for name in table:
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", name):
                rule = "a name is letters, digits, dashes and underscores, up to 100"
                raise UserError(f"has a {kind} named {cut(repr(name))}: {rule}")
        return table

    return AfterValidator(check)
