"""What MkDocs reads for the site: the repository's own pages where they lie, and a reference made from the code.

`on_files` adds every Markdown page under its path in the repository, so that links between pages hold in both places,
and every file that a page links to. `reference/` is made: the public names, the keys of experiment files, the commands.
"""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
FOLDERS = (".github", "experiments", "jdp")
SEARCH_WORKER = "https://unpkg.com/iframe-worker/shim"
"""What the `offline` plugin loads from elsewhere; `pages/iframe_worker.js` is that file."""
MODULES = ("checkpoint", "data", "export", "guard", "models", "prove")
"""The public modules of jdp, each with its `__all__`."""
FORESIGHT = ("any_step.forecast", "forecast", "step_report", "targets", "verify")
"""Where the classes are that `jdp.foresee` and `jdp.verify` return."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = [ROOT / "README.md", *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
    linked = {to for page in pages for to in _links(page) if to.is_file() and to.suffix != ".md"}
    for path in sorted({*pages, *linked}):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    for name, text in reference().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leave the language of a block only: of "```python pmap before" MkDocs would make no block."""
    return re.sub(r"^(```\w+) [\w ]+$", r"\1", markdown, flags=re.M)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    return output.replace(SEARCH_WORKER, get_relative_url("iframe_worker.js", page.url))


def _links(page: Path) -> list[Path]:
    """Return the files of the repository that a page links to."""
    return [(page.parent / to).resolve() for to in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))]


def reference() -> dict[str, str]:
    """Return the pages of the reference: name -> Markdown."""
    return {"api": _api(), "modules": _modules(), "experiment": _experiment(), "commands": _commands()}


def _api() -> str:
    jdp = importlib.import_module("jdp")
    values = {name: getattr(jdp, name) for name in jdp.__all__}
    named = {name: value for name, value in values.items() if inspect.isclass(value) or inspect.isfunction(value)}
    parts = [_described(f"jdp.{name}", value) for name, value in named.items()]
    return "\n\n".join(["# Python: `import jdp`", *parts])


def _modules() -> str:
    jdp = importlib.import_module("jdp")
    above = [getattr(jdp, name) for name in jdp.__all__]
    parts = ["# Python: modules of jdp"]
    for module in MODULES:
        parts.append(f"## `jdp.{module}`")
        content = importlib.import_module(f"jdp.{module}")
        for name in content.__all__:
            value = getattr(content, name)
            if value not in above:
                parts.append(_described(f"jdp.{module}.{name}", value, level=3))
    parts.append("## What `jdp.foresee` and `jdp.verify` return")
    for module in FORESIGHT:
        parts.append(f"::: jdp.foresight.{module}\n    options: {{heading_level: 3}}")
    return "\n\n".join(parts)


def _described(name: str, value: object, level: int = 2) -> str:
    """Return what mkdocstrings makes of a public name, under that name and not that of the file it is written in."""
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return f"{'#' * level} `{name}`\n\n`{value!r}`"
    where = f"{value.__module__}.{value.__qualname__}"
    return f"::: {where}\n    options: {{heading: {name}, toc_label: {name}, heading_level: {level}}}"


def _experiment() -> str:
    parts = ["# Keys of an experiment file"]
    for heading, keys in importlib.import_module("jdp.experiment.file").describe():
        rows = [
            f"| `{key.name}` | {_cell(key.type)} | {_cell(key.default)} | {_cell(key.description)} |" for key in keys
        ]
        title, _, text = heading.partition(": ")
        parts.append(f"## {title}\n\n{text}")
        parts.append("\n".join(["| key | type | default | |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _commands() -> str:
    main = importlib.import_module("jdp.cli.main")
    parts = ["# Every option of every command", inspect.getdoc(main).partition("\n\n")[2].partition("\n\n")[0]]
    for command in main.COMMANDS:
        parts.append(f"## `jdp {command}`\n\n" + _help(command))
    return "\n\n".join(parts)


def _help(command: str) -> str:
    printed = subprocess.run(
        [sys.executable, "-m", "jdp", command, "--help"], cwd=ROOT, check=True, capture_output=True
    )
    return f"```text\n{printed.stdout.decode()}\n```"
