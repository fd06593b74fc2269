"""Shared by the commands: options and their help, overrides of an experiment's keys, files, and stdout for JSON alone.

The help is written here rather than by tyro, which breaks sentences and shows "(default: None)".
"""

import ast
import contextlib
import dataclasses
import inspect
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from jdp.base.errors import UserError
from jdp.base.machine import choose_platform
from jdp.base.toml import brief
from jdp.base.user_path import user_path
from jdp.base.words import nearest

ALL_KEYS = "--help-all"
HELP = {"-h", "--help", ALL_KEYS}
USUAL_KEYS = (
    *("name", "strategy", "precision", "devices", "mesh.AXIS"),
    *("model.name", "data.source", "data.tokenizer", "data.length"),
    *("optimizer.name", "optimizer.lr", "optimizer.warmup_steps", "optimizer.schedule", "optimizer.weight_decay"),
    *("train.steps", "train.batch_size", "train.accumulate"),
    *("train.eval_every", "train.checkpoint_every", "train.init_from"),
)
"""The keys that users change most, a line each in `--help`."""


class UsageError(UserError):
    """A mistake on the command line."""


def parse(options: type[Any], name: str, arguments: list[str]) -> Any:
    """Parse a command's options; `~` in paths is resolved. Raises UsageError with tyro's words for a mistake."""
    if HELP.intersection(arguments):
        print(command_help(name, options, every_key=ALL_KEYS in arguments), flush=True)  # while it can be reported
        raise SystemExit(0)
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for field in dataclasses.fields(options):
        flag = flag_of(field.name)
        if sum(word.partition("=")[0] == flag for word in own) > 1 and not isinstance(field.default, tuple):
            raise UsageError(f"{flag} is given twice: keep one")
    import tyro  # late, because it takes a tenth of a second

    told = io.StringIO()  # in a box: a title, the problem, a rule or an empty row, more
    try:
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            parsed = tyro.cli(options, prog=f"jdp {name}", args=arguments, config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit:
        rows = "\n".join(row.strip("│ ") for row in told.getvalue().splitlines()[1:]).lstrip("-\n")
        problem = " ".join(re.split(r"\n\W*\n", rows)[0].split()).removesuffix(" (required)")
        problem = re.sub(r"(?<=options: )[\w.]+=.*", r"\g<0>: write --KEY=VALUE", problem)
        unknown = problem.partition("Unrecognized options: ")[2].partition(",")[0]
        hint = nearest(unknown, flags_of(options), cutoff=0.8) or f"; see jdp {name} --help"
        raise UsageError(f"{problem.rstrip('.')}{hint}") from None
    paths = {field: user_path(value) for field, value in vars(parsed).items() if isinstance(value, Path)}
    return dataclasses.replace(parsed, **paths)


def parse_with_overrides(options: type[Any], name: str, arguments: list[str]) -> tuple[Any, dict[str, str]]:
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
            from jdp.experiment.schema.experiment import Experiment

            if "." not in key and key not in Experiment.model_fields:
                raise UsageError(f"there is no option {flag} here; see --help")
            raise UsageError(f"{flag} needs a value: {flag} VALUE, or {flag}=VALUE")
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


def check_writable(path: Path | None) -> None:
    if path is None:
        return
    if not path.parent.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {path.parent}; make it, or choose another file")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
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


# The help.


def command_help(name: str, options: type[Any], *, every_key: bool = False) -> str:
    """Return the help of a command. If it takes an experiment, the usual keys follow, or every key in full."""
    hints = get_type_hints(options, include_extras=True)
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(options))).body
    assert isinstance(tree, ast.ClassDef)
    pairs = zip(tree.body, tree.body[1:], strict=False)
    texts = {a.target: b.value for a, b in pairs if isinstance(a, ast.AnnAssign) and isinstance(b, ast.Expr)}
    docs = {ast.unparse(name): " ".join(ast.literal_eval(text).split()) for name, text in texts.items()}
    usage, rows = f"usage: jdp {name} [OPTIONS]{' -- COMMAND' if name == 'launch' else ''}", list[tuple[str, str]]()
    for field in dataclasses.fields(options):
        kept: tuple[Any, ...] = getattr(hints[field.name], "__metadata__", ())
        setting = next((one for one in kept if hasattr(one, "metavar")), None)
        value = "" if setting is None else setting.metavar
        if any(str(one) == "Positional" for one in kept):
            usage, first = f"{usage} {value}", value
        else:
            long = f"--{(setting and setting.name) or field.name.replace('_', '-')}"
            first = f"{', '.join([long, *((setting and setting.aliases) or ())])} {value}".rstrip()
        no_default = [None, False, (), dataclasses.MISSING]
        is_said = "efault" in docs[field.name] or any(field.default is one for one in no_default)
        shown = "" if is_said else f" Default: {field.default}."
        rows.append((first, docs[field.name] + shown))
    rows.append(("-h, --help", "Show this help."))
    paragraphs = inspect.cleandoc(options.__doc__ or "").split("\n\n")
    lines = [usage, "", *(f"{wrapped(' '.join(text.split()))}\n" for text in paragraphs), *_table(rows)]
    if any(field.name == "file" for field in dataclasses.fields(options)):
        lines += _every_key() if every_key else _usual_keys(name)
    return "\n".join(lines)


def wrapped(text: str, first: str = "", later: str = "") -> str:
    """Wrap text to the terminal's width, at most 120; `first` and `later` begin the lines."""
    width = min(shutil.get_terminal_size().columns, 120)
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)


def _usual_keys(command: str) -> list[str]:
    """Return each of `USUAL_KEYS` with its description up to the first ":" or ";", and its choices."""
    from jdp.experiment.file import describe

    keys = {key.name: key for _, table in describe() for key in table}
    rows = list[tuple[str, str]]()
    for key in map(keys.__getitem__, USUAL_KEYS):
        is_choice = re.fullmatch(r"\w+(\|\w+)+", key.type) and "none" not in key.type
        choices = f": {key.type.replace('|', ', ')}" if is_choice else ""
        rows.append((f"--{key.name}", f"{re.split(r'[:;.](?: |$)', key.description)[0]}{choices}."))
    return ["", f"The usual keys of an experiment; jdp {command} {ALL_KEYS} has every key:", *_table(rows)]


def _every_key() -> list[str]:
    from jdp.experiment.file import describe

    lines = list[str]()
    for heading, keys in describe():
        lines += ["", heading]
        for key in keys:
            default = key.default if key.default in ("required", "by size") else f"default {key.default}"
            lines += [f"  --{key.name}  {key.type}  ({default})", wrapped(key.description, " " * 8, " " * 8)]
    return lines


def _table(rows: list[tuple[str, str]]) -> list[str]:
    """Return rows in two columns; after a long first cell the text begins on the next line."""
    indent = min(max(len(first) for first, _ in rows), 24) + 4
    lines = list[str]()
    for first, text in rows:
        if len(first) + 4 > indent:
            lines.append(f"  {first}")
            first = ""
        lines.append(wrapped(text, f"  {first}".ljust(indent), " " * indent))
    return lines
