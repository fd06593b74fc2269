"""Shared by the commands: typed options, overrides of an experiment's keys, and stdout reserved for one JSON object."""

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from jdp.base.errors import UserError
from jdp.base.machine import choose_platform
from jdp.base.toml import brief
from jdp.base.user_path import user_path
from jdp.base.words import nearest
from jdp.cli.help import ALL_KEYS, command_help


class UsageError(UserError):
    """A mistake on the command line."""


def parse(options: type[Any], name: str, arguments: list[str]) -> Any:
    """Parse a command's options; `~` in paths is resolved. tyro reports a mistake and exits with 2."""
    if asked := {"-h", "--help", ALL_KEYS}.intersection(arguments):
        print(command_help(name, options, every_key=ALL_KEYS in asked))
        raise SystemExit(0)
    import tyro  # late, because it takes a tenth of a second

    parsed = tyro.cli(options, prog=f"jdp {name}", args=arguments, config=(tyro.conf.FlagCreatePairsOff,))
    paths = {name: value for name, value in vars(parsed).items() if isinstance(value, Path)}
    for name, value in paths.items():
        try:
            paths[name] = user_path(value)
        except ValueError as error:
            raise UsageError(f"{flag_of(name)}: {error}") from None
    return dataclasses.replace(parsed, **paths)


def parse_with_overrides(options: type[Any], name: str, arguments: list[str]) -> tuple[Any, dict[str, str]]:
    """Parse the options of a command that takes an experiment, and the overrides of the experiment's keys."""
    remaining, overrides = split_overrides(arguments, flags_of(options))
    return parse(options, name, remaining), overrides


def flags_of(options: type[Any]) -> list[str]:
    """Return a command's own flags, such as "--run-dir"."""
    return ["--help", ALL_KEYS, *(flag_of(field.name) for field in dataclasses.fields(options))]


def flag_of(name: str) -> str:
    """Return a field's name on the command line: "--run-dir", or "FILE"."""
    return "FILE" if name == "file" else f"--{name.replace('_', '-')}"


def split_overrides(arguments: Sequence[str], flags: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split `--a.b value` and `--a.b=value` from a command's own arguments."""
    kept: list[str] = []
    overrides: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--") or flag.replace("_", "-") in flags:
            kept.append(word)
            continue
        key = flag.removeprefix("--")
        if "." not in key and (hint := nearest(flag, flags, cutoff=0.8)):
            raise UsageError(f"there is no option {flag}{hint}")
        value = value if equals else next(words, None)
        if value is None or (not equals and value.startswith("--")):
            what = f"{flag} needs a value" if "." in key else f"{flag} is no option here, or needs a value as a key"
            raise UsageError(f"{what}: {flag} VALUE, or {flag}=VALUE")
        if key in overrides:
            raise UsageError(f"{flag} is given twice: {overrides[key]} and {value}; remove one")
        overrides[key] = value
    return kept, overrides


@contextlib.contextmanager
def stdout_to_stderr(wanted: bool = True) -> Generator[None]:
    """Redirect stdout to stderr if `wanted`, also for C++ (Gloo prints when it connects)."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def words(text: str, flag: str) -> list[str]:
    """Split an option's text at its commas: "zero1, zero3" is ["zero1", "zero3"]."""
    listed = [word.strip() for word in text.split(",") if word.strip()]
    if not listed or len(set(listed)) != len(listed):
        raise UsageError(f"{flag} takes different words with commas between; given {brief(text)}: name each once")
    return listed


def counts(text: str | None, flag: str) -> list[int] | None:
    """Return an option's numbers: "1,4" is [1, 4]; None stays None."""
    if text is None:
        return None
    listed = words(text, flag)
    if not all(re.fullmatch(r"[1-9]\d{0,8}", word) for word in listed):
        raise UsageError(
            f"{flag} takes positive whole numbers below 10^9 with commas between; given {brief(text)}: write 1,4"
        )
    return [int(word) for word in listed]


def check_writable(path: Path | None) -> None:
    """Check before the work that a file can be written."""
    if path is None:
        return
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {folder}; make it, or choose another file")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        why = "it is a folder" if path.is_dir() else "permission denied"
        raise UsageError(f"{path} cannot be written: {why}; choose another file")


def write_file(path: Path, text: str) -> None:
    """Write or replace a file in one rename; write directly to a device such as /dev/stdout."""
    file = path.resolve()  # a link stays a link
    fresh = file.with_name(f".{file.name}.new")
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, "utf-8", errors="replace")
        else:
            fresh.write_text(text, "utf-8", errors="replace")
            fresh.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error.strerror}; choose another file") from None


def choose_target_platform(targets: Sequence[str | None], devices: int | None = None) -> None:
    """Choose JAX's platform for compiling for targets: virtual CPU devices for "cpu:8", else the CPU."""
    if numbers := [int(found[1]) for name in targets if (found := re.fullmatch(r"cpu:(\d{1,5})", name or ""))]:
        choose_platform(max(numbers))
    elif None in targets:
        choose_platform(devices)
    else:
        import jax

        jax.config.update("jax_platforms", "cpu")
