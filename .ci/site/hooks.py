"""What MkDocs reads for the site: the repository's own pages where they lie, and a reference made from the code.

`on_files` adds every Markdown page under its path in the repository, so that links between pages hold in both places,
and every file that a page links to. `reference/` is made: public names by task, keys of experiment files, commands.
"""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
FOLDERS = (".github", "experiments", "jdp")
SEARCH_WORKER = "https://unpkg.com/iframe-worker/shim"
"""What the `offline` plugin loads from elsewhere; `pages/iframe_worker.js` is that file."""
API = {
    "plan": ("Plan and mesh", "jdp.initialize jdp.make_mesh jdp.Plan jdp.Placement"),
    "state": (
        "State and optimizers",
        "jdp.init_state jdp.abstract_state jdp.TrainState jdp.init jdp.place jdp.muon jdp.with_ema jdp.ema_params "
        "jdp.scaled_lr jdp.warmup",
    ),
    "step": (
        "Step and loss",
        "jdp.make_train_step jdp.make_eval_step jdp.Step jdp.Loss jdp.gather_rows jdp.value_and_grad jdp.ValueAndGrad "
        "jdp.scan_layers jdp.Precision jdp.keep_programs jdp.keep_memory",
    ),
    "data": ("Data", "jdp.shard_batches jdp.process_rows jdp.Feed jdp.data"),
    "checkpoints": (
        "Checkpoints and exports",
        "jdp.Checkpoints jdp.save jdp.restore jdp.restore_params jdp.CheckpointError jdp.checkpoint jdp.export",
    ),
    "foresight": (
        "Foresight and proof",
        "jdp.foresee jdp.verify jdp.foresight.foresee.PlanReport jdp.foresight.foresee.Estimate "
        "jdp.foresight.memory.StepReport jdp.foresight.verify.Report jdp.foresight.targets.Target jdp.prove",
    ),
    "faults": ("Faults", "jdp.Deadline jdp.guard"),
    "models": ("Models", "jdp.models"),
}
"""The pages of the Python reference, by task: file -> (title, names; a module stands for its `__all__`)."""
MEMBERS = {
    "jdp.Plan": "batch_sharding placements",
    "jdp.Placement": "",
    "jdp.Precision": "",
    "jdp.Step": "lower compile",
    "jdp.ValueAndGrad": "check",
    "jdp.Deadline": "step beat during",
    "jdp.foresight.foresee.PlanReport": "choice why to_json",
    "jdp.foresight.foresee.Estimate": "memory fits bytes_per_device step_seconds mfu tokens_per_second efficiency",
    "jdp.foresight.memory.StepReport": "verdict to_json",
    "jdp.foresight.verify.Report": "theory_wire_bytes_per_device verdict to_json",
    "jdp.foresight.targets.Target": "",
}
"""The members that users call of classes that have others too."""


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
    pages = {name: _api(title, names.split()) for name, (title, names) in API.items()}
    return pages | {"experiment": _experiment(), "commands": _commands()}


def _api(title: str, names: list[str]) -> str:
    parts, described = [f"# {title}"], set[int]()
    for name in names:
        value = _value(name)
        public = [f"{name}.{each}" for each in value.__all__] if inspect.ismodule(value) else [name]
        for each in public:
            if (known := id(_value(each))) not in described:
                described.add(known)
                parts.append(_described(each, _value(each)))
    return "\n\n".join(parts)


def _value(name: str) -> Any:
    """Return what a dotted name stands for: a module, or a name in one."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, last = name.rpartition(".")
        return getattr(importlib.import_module(module), last)


def _described(name: str, value: object) -> str:
    """Return what mkdocstrings makes of a public name, under that name and not that of the file it is written in."""
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return f"## `{name}`\n\n`{value!r}`"
    where = f"{value.__module__}.{value.__qualname__}"
    members = f", members: [{', '.join(MEMBERS[name].split())}]" if name in MEMBERS else ""
    return f"::: {where}\n    options: {{heading: {name}, toc_label: {name}{members}}}"


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
