"""Make the API reference of jdp from its docstrings, as HTML pages that need no network.

    pip install '.[docs]' && python .ci/reference.py FOLDER

Exit 1 where a docstring refers to what is not there, or a link leads nowhere; each is printed.
"""

import importlib
import inspect
import posixpath
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pdoc.doc
import pdoc.render

MODULES = (
    "jdp",
    "jdp.checkpoint",
    "jdp.data",
    "jdp.export",
    "jdp.foresight.any_step.forecast",
    "jdp.foresight.forecast",
    "jdp.foresight.step_report",
    "jdp.foresight.targets",
    "jdp.foresight.verify",
    "jdp.guard",
    "jdp.models",
    "jdp.plugin",
    "jdp.prove",
)
"""What the README names, and what `jdp.foresee` and `jdp.verify` return."""
PACKAGE = Path(__file__).parents[1] / "jdp"


def main(folder: Path) -> int:
    """Write the pages, and print what they refer to that is not there; return the exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pages = made(MODULES)
    for name, text in pages.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    wrong = [*dangling_links(pages), *(problem for name in MODULES for problem in unresolved(name))]
    print(*wrong, f"{len(pages)} pages in {folder}, {len(wrong)} references that lead nowhere", sep="\n")
    return 1 if wrong else 0


def made(modules: tuple[str, ...]) -> dict[str, str]:
    """Return the pages of these modules, an index, and what its search needs: name of the file -> text."""
    pdoc.render.configure(docformat="google", show_source=False, search=True)
    documented = {name: pdoc.doc.Module(whole(importlib.import_module(name))) for name in modules}
    written = {name.replace(".", "/"): pdoc.render.html_module(one, documented) for name, one in documented.items()}
    pages = {f"{name}.html": text for name, text in written.items()}
    return pages | {"index.html": pdoc.render.html_index(documented), "search.js": pdoc.render.search_index(documented)}


def whole(module: ModuleType) -> ModuleType:
    """Have a module import the names that it imports when they are first used: pdoc looks at what is there."""
    for name in getattr(module, "__all__", ()):
        setattr(module, name, getattr(module, name))
    return module


def dangling_links(pages: dict[str, str]) -> Iterator[str]:
    """Yield the links to a page, or to a place on one, that is not there."""
    anchors = {name: {"", *re.findall(r'\bid="([^"]+)"', text)} for name, text in pages.items()}
    for name, text in pages.items():
        for link in sorted({*re.findall(r'\bhref="([^"$]+)"', text)}):
            page, _, anchor = link.partition("#")
            to = posixpath.normpath(posixpath.join(posixpath.dirname(name), page)) if page else name
            if not re.match(r"https?:", link) and anchor not in anchors.get(to, ()):
                yield f"{name} links to {link}"


def unresolved(name: str) -> Iterator[str]:
    """Yield what the docstrings of a module's public names call `jdp.…`, `Class.…` or `file.py` and is not there."""
    module = importlib.import_module(name)
    public = {each: getattr(module, each) for each in getattr(module, "__all__", ())}
    documented = {name: module, **{f"{name}.{each}": value for each, value in public.items()}}
    for value in list(public.values()):
        if inspect.isclass(value):
            documented |= {f"{value.__name__}.{each}": one for each, one in vars(value).items() if each[0] != "_"}
    for where, value in documented.items():
        for word in re.findall(r"`([\w./]+)(?:\(.*?\))?`", inspect.getdoc(value) or ""):
            if not is_there(word):
                yield f"the docstring of {where} names `{word}`"


def is_there(word: str) -> bool:
    """Return False for a name of jdp's, or a file, that does not exist; True for all other words."""
    if word.endswith(".py"):
        return any(path.as_posix().endswith(f"/{word}") for path in PACKAGE.parent.rglob("*.py"))
    first, *rest = word.split(".")
    jdp = importlib.import_module("jdp")
    if first == "jdp":
        return reached(jdp, rest)
    is_class = first[:1].isupper() and first in jdp.__all__
    return not rest or not is_class or reached(getattr(jdp, first), rest)


def reached(value: object, names: list[str]) -> bool:
    """Return whether attributes, modules or fields of these names lead on from a value."""
    for name in names:
        if isinstance(value, ModuleType) and not hasattr(value, name):
            try:
                value = importlib.import_module(f"{value.__name__}.{name}")
            except ModuleNotFoundError:
                return False
        elif hasattr(value, name):
            value = getattr(value, name)
        else:
            return name in getattr(value, "__annotations__", {})
    return True


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) == 2 else "build/api")))
