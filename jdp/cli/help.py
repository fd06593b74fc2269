"""The text of `--help`: what a command does, its options, and the keys of an experiment.

It is written here rather than by tyro, which breaks sentences and shows "(default: None)".
"""

import ast
import dataclasses
import inspect
import re
import shutil
import textwrap
from typing import Any, get_type_hints

ALL_KEYS = "--help-all"
USUAL_KEYS = (
    *("name", "strategy", "precision", "devices", "mesh.AXIS"),
    *("model.name", "data.source", "data.tokenizer", "data.length"),
    *("optimizer.name", "optimizer.lr", "optimizer.warmup_steps", "optimizer.schedule", "optimizer.weight_decay"),
    *("train.steps", "train.batch_size", "train.accumulate"),
    *("train.eval_every", "train.checkpoint_every", "train.init_from"),
)
"""The keys that users change most, a line each in `--help`."""


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
    """Return all keys by table, each with its type, default and description."""
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
