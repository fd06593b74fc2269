"""The API reference is made from the docstrings, without a warning, and leaves nothing out that the README names."""

import importlib.util
import inspect
import re
import sys
from html import unescape
from pathlib import Path
from types import ModuleType

import pytest

import jdp

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference", ROOT / ".ci" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(reference, tmp_path_factory):
    """What the command of the README writes: page -> text."""
    folder = tmp_path_factory.mktemp("reference")
    assert reference.main(folder) == 0
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.html")}


def part(page, name):
    """The words of the part of a page that has this anchor."""
    _, _, rest = page.partition(f'<section id="{name}">')
    return unescape(re.sub(r"<[^>]+>", "", rest.partition("</section>")[0]))


def test_every_public_name_is_there_with_its_arguments(pages):
    for name in jdp.__all__:
        value = getattr(jdp, name)
        if isinstance(value, ModuleType):
            assert f"jdp/{name}.html" in pages
            continue
        words = part(pages["jdp.html"], name)
        assert name in words
        if inspect.isfunction(value):
            for parameter in inspect.signature(value).parameters:
                assert re.search(rf"\b{parameter}\b.*Arguments:.*\b{parameter}\b.*:", words, flags=re.S), (
                    name,
                    parameter,
                )


def test_what_the_readme_names_is_there(pages):
    named = {tuple(name.split(".")) for name in re.findall(r"\bjdp\.([a-zA-Z_]\w*(?:\.[a-zA-Z_]\w*)*)", README)}
    named -= {name for name in named if name[0] in ("toml", "log")}
    assert len(named) > 25
    imported = re.findall(r"from jdp\.([\w.]+) import ([\w, ]+)", README)
    named |= {(*module.split("."), name) for module, names in imported for name in names.split(", ")}
    for name in named:
        at = max((i for i in range(len(name) + 1) if "/".join(("jdp", *name[:i])) + ".html" in pages), default=0)
        page, anchor = "/".join(("jdp", *name[:at])) + ".html", ".".join(name[at:])
        assert not anchor or f'id="{anchor}"' in pages[page], f"jdp.{'.'.join(name)}"


def test_the_readme_has_the_command():
    assert "pip install '.[docs]' && python .ci/reference.py" in README


def test_what_leads_nowhere_is_found(reference, monkeypatch):
    links = '<a href="b.html#two"></a><a href="#here"></a><a id="here" href="../c.html"></a><a href="b.html#one"></a>'
    found = reference.dangling_links({"a/a.html": links, "a/b.html": '<p id="one">'})
    assert list(found) == ["a/a.html links to ../c.html", "a/a.html links to b.html#two"]
    module = ModuleType(
        "invented", "See `jdp.Plans`, `Plan.offloads`, `jdp/core/nothing.py`, `jdp.core.init.train_state`, `any.word`."
    )
    monkeypatch.setitem(sys.modules, "invented", module)
    missing = [re.search("`(.*)`", each)[1] for each in reference.unresolved("invented")]
    assert missing == ["jdp.Plans", "Plan.offloads", "jdp/core/nothing.py"]
    good = "`jdp.core.init` `jdp.guard.check_replicas(state)` `Plan.placements` `Step.partitioning` `placement.py`"
    module.__doc__ = good
    assert list(reference.unresolved("invented")) == []
