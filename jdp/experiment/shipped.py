"""The experiments that jdp ships, by name: `jdp train quickstart`.

In a clone their files are `experiments/*.toml`; in a wheel they are in `shipped_files/` beside this module.
"""

import os
import re
from pathlib import Path
from typing import Any, cast

from jdp.base.hub_source import BUILDERS
from jdp.base.words import nearest

_INSTALLED = Path(__file__).parent / "shipped_files"
_CLONED = Path(__file__).parents[2] / "experiments"


def shipped() -> dict[str, Path]:
    """Return name -> file of each experiment that jdp ships, sorted by name."""
    folder = _INSTALLED if _INSTALLED.is_dir() else _CLONED
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def shipped_file(path: Path) -> Path | None:
    """Return the file of a shipped experiment if `path` is its name and does not exist; else None."""
    return None if os.path.lexists(path) else shipped().get(str(path))


_UP = re.compile(rf"^(hf:(?:(?:{'|'.join(BUILDERS)}):)?)?\.\./")


def beside_clone(table: dict[str, Any]) -> dict[str, Any]:
    """Return a shipped experiment's table with its relative paths, such as "../runs/quickstart", as "runs/quickstart".

    They then start at the working directory, as they do in the clone's folder.
    """
    beside = dict(table)
    for key, value in table.items():
        if isinstance(value, dict):
            beside[key] = beside_clone(cast("dict[str, Any]", value))
        elif isinstance(value, str):
            beside[key] = _UP.sub(r"\1", value)
    return beside


def copied(start: str, name: str) -> str:
    """Return the text of a shipped experiment under another name, with paths that start at the working directory."""
    text = shipped()[start].read_text(encoding="utf-8").replace(f"experiments/{start}.toml", f"{name}.toml")
    text = re.sub(r'(?<=")[^"\n]*(?=")', lambda quoted: _UP.sub(r"\1", quoted[0]), text)
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
