"""`jdp train FILE` reads through `base` and nine packages, one way down, from `cli/train.py`."""

import ast
from pathlib import Path

import jdp

PACKAGE = Path(jdp.__file__).parent
ROAD = ["cli/main.py", "cli/train.py", "cli/options.py"]
PACKAGES = {"base", "cli", "run", "experiment", "guard", "launch", "checkpoint", "data", "core", "models"}
"""`launch` has the log of events, which its supervisors write too."""


def entered(file):
    """The packages of jdp that a file imports from, at the top or inside a function."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (name.split(".")[1] for name in names if name.startswith("jdp."))


def test_training_enters_no_foresight_prove_or_report():
    files = [PACKAGE / name for name in ROAD]
    files += [file for folder in ("run", "run/outputs") for file in (PACKAGE / folder).glob("*.py")]
    files.remove(PACKAGE / "run" / "read_folder.py")  # reads what a run left
    assert {name for file in files for name in entered(file)} == PACKAGES
