"""What the commands share: typed options, overrides of an experiment's keys, and stdout kept for one JSON object."""

import contextlib
import dataclasses
import os
import shutil
import sys
import textwrap
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import tyro

from jdp.core.hints import nearest
from jdp.core.toml import brief
from jdp.core.user_path import user_path


class UsageError(ValueError):
    """The command line itself is wrong."""


def parse(options: type[Any], name: str, arguments: list[str]) -> Any:
    """Read typed options; tyro says what is wrong and exits with 2."""
    found = tyro.cli(options, prog=f"jdp {name}", args=arguments, config=(tyro.conf.FlagCreatePairsOff,))
    return dataclasses.replace(found, **dict(_paths(found)))


def _paths(found: Any) -> Iterator[tuple[str, Path]]:
    """The options that are paths, `~` filled in. Raises UsageError."""
    for field in dataclasses.fields(found):
        value = getattr(found, field.name)
        if isinstance(value, Path):
            try:
                yield field.name, user_path(value)
            except ValueError as error:
                flag = "FILE" if field.name == "file" else f"--{field.name.replace('_', '-')}"
                raise UsageError(f"{flag}: {error}") from None


def parse_with_overrides(options: type[Any], name: str, arguments: list[str]) -> tuple[Any, dict[str, str]]:
    """The options of a command that takes an experiment, and the overrides of the experiment's keys."""
    if {"-h", "--help"} & set(arguments):
        _help_with_keys(options, name)
        raise SystemExit(0)
    own, overrides = split_overrides(arguments, flags(options))
    return parse(options, name, own), overrides


def split_overrides(arguments: Sequence[str], own: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Part `--a.b value` and `--a.b=value` from a command's own arguments.

    Args:
        arguments: as on the command line.
        own: the command's own flags, such as "--run-dir".

    Returns:
        The own arguments in their order, and dotted key -> text. A value may start with a dash (`--mesh.data -1`).

    Raises:
        UsageError: an override has no value or is given twice, or a flag looks like one of `own` misspelt.
    """
    rest: list[str] = []
    overrides: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--") or flag.replace("_", "-") in own:
            rest.append(word)
            continue
        key = flag.removeprefix("--")
        if "." not in key and (hint := nearest(flag, own, cutoff=0.8)):
            raise UsageError(f"there is no option {flag}{hint}")
        value = value if equals else next(words, None)
        if value is None or (not equals and value.startswith("--")):
            raise UsageError(f"{flag} needs a value: {flag} VALUE, or {flag}=VALUE")
        if key in overrides:
            raise UsageError(f"{flag} is given twice: {overrides[key]} and {value}")
        overrides[key] = value
    return rest, overrides


def flags(options: type[Any]) -> list[str]:
    return ["--help", *(f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(options))]


def cut(words: list[str], at: str) -> tuple[list[str], bool, list[str]]:
    """The words before the first `at`, whether there is one, and the words after it."""
    where = words.index(at) if at in words else len(words)
    return words[:where], at in words, words[where + 1 :]


@contextlib.contextmanager
def stdout_to_stderr() -> Generator[None]:
    """Send to stderr what anyone writes to stdout: also what C++ writes there, as Gloo does when it connects."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _help_with_keys(options: type[Any], name: str) -> None:
    """tyro's help of the options, then every key of an experiment."""
    from jdp.experiment.file import describe

    with contextlib.suppress(SystemExit):
        parse(options, name, ["--help"])
    width = min(shutil.get_terminal_size().columns, 120)
    for heading, keys in describe():
        print(f"\n{heading}")
        for key in keys:
            default = key.default if key.default in ("required", "by size") else f"default {key.default}"
            print(f"  --{key.name}  {key.type}  ({default})")
            print(textwrap.fill(key.description, width, initial_indent=" " * 8, subsequent_indent=" " * 8))


def words(text: str, flag: str) -> list[str]:
    """ "zero1, zero3" -> ["zero1", "zero3"]. Raises UsageError when nothing or something twice is given."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found or len(set(found)) != len(found):
        raise UsageError(f"{flag} takes different words with commas between; got {text!r}")
    return found


def counts(text: str | None, flag: str) -> list[int] | None:
    """ "1,4" -> [1, 4]; None stays None. Raises UsageError for anything but positive whole numbers."""
    if text is None:
        return None
    found = words(text, flag)
    if not all(word.isdecimal() and len(word) < 10 and int(word) > 0 for word in found):
        raise UsageError(f"{flag} takes positive whole numbers below 10^9 with commas between; got {brief(text)}")
    return [int(word) for word in found]


def writable(path: Path | None) -> None:
    """Say before the work, not after it, that a file cannot be written. Raises UsageError."""
    if path is None:
        return
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {folder}")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"{path} cannot be written: {'it is a folder' if path.is_dir() else 'permission denied'}")


def choose_target_platform(target: str | None, devices: int | None) -> None:
    """What JAX starts on, to compile for `target`: virtual CPU devices for "cpu:8", else nothing but the CPU.

    Args:
        target: as on the command line; None means this machine's own devices.
        devices: virtual CPU devices that the experiment asks for.
    """
    from jdp.core.machine import choose_platform

    kind, _, number = (target or "").partition(":")
    if target is None:
        choose_platform(devices)
    elif kind == "cpu" and number.isdecimal() and len(number) < 6 and int(number):
        choose_platform(int(number))
    else:
        import jax

        jax.config.update("jax_platforms", "cpu")
