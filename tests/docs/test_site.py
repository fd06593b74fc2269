"""The site is built from the repository without a warning, so its links lead somewhere; its pages work offline."""

import importlib
import inspect
import pkgutil
import re
import shutil
import time
from html import unescape
from types import ModuleType

import pytest
from chromium import MISSING, Chromium, find_chromium
from own_process import python
from paths import ROOT

import jdp

PUBLIC = ("jdp", "jdp.checkpoint", "jdp.data", "jdp.export", "jdp.guard", "jdp.models", "jdp.prove")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """What the command in CONTRIBUTING.md writes; `--strict`: a link or an anchor that leads nowhere is an error."""
    folder = tmp_path_factory.mktemp("site")
    words = "-m", "mkdocs", "build", "--strict", "-f", ".ci/site/mkdocs.yml", "-d", folder
    built = python(*words, cwd=ROOT, timeout=900)
    assert built.returncode == 0, built.stderr[-4000:]
    yield folder
    shutil.rmtree(folder)


@pytest.mark.rest
def test_every_page_is_in_the_contents(site):
    """A guide has its own line there, not that of its section; a fence that is shown is a block that is none."""
    assert len([*site.rglob("*.html")]) > 20
    contents = (site / "index.html").read_text().partition("md-nav--primary")[2].partition("md-sidebar--secondary")[0]
    entry = re.compile(r'<a href="([^"]+)" class="md-nav__link.*?md-ellipsis">\s*(.*?)\s*<', flags=re.S)
    listed = dict(entry.findall(contents))
    assert listed["jdp/models/index.html"] == "Models"
    for page in site.rglob("*.html"):
        assert page.name == "404.html" or page.relative_to(site).as_posix() in listed
        assert "```" not in page.read_text(), page


@pytest.mark.rest
def test_the_reference_has_every_public_name(site):
    """By task, with arguments; without members that only jdp calls."""
    pages = {page.stem: page.read_text() for page in (site / "reference").glob("*.html")}
    assert {"plan", "state", "step", "data", "checkpoints", "foresight"} <= {*pages}
    text = "".join(pages.values())
    headings = [unescape(re.sub(r"<[^>]+>", "", title)) for title in re.findall(r"<h2.*?</h2>", text, flags=re.S)]
    words = [word for heading in headings for word in re.split(r"[\s¶`]+", heading)]
    for module in map(importlib.import_module, PUBLIC):
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, ModuleType | str):
                continue
            assert words.count(f"{module.__name__}.{name}") == 1 or getattr(jdp, name, None) is value, name
            if inspect.isfunction(value):
                *_, part = text.partition(f'id="{value.__module__}.{value.__qualname__}"')
                for parameter in inspect.signature(value).parameters:
                    assert re.search(rf"<code>{parameter}</code>", part), (name, parameter)
    assert 'id="jdp.core.plan.Plan.placements"' in text
    assert 'id="jdp.core.plan.Plan.state_placements"' not in text
    assert 'id="jdp.core.step.Step.jitted"' not in text


@pytest.mark.rest
@pytest.mark.skipif(find_chromium() is None, reason=MISSING)
def test_pages_open_without_errors_or_foreign_files(site):
    with Chromium() as browser:
        for page in ("index", "jdp/core/index", "jdp/guard/errors", "reference/step", "experiments/lessons/index"):
            browser.open(site / f"{page}.html")
            assert browser.errors == []
            assert {request.partition(":")[0] for request in browser.requests} <= {"file", "data", "blob"}
            assert browser.evaluate("document.querySelector('.md-nav--primary').innerText.includes('Reference')")
            assert browser.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
            assert page != "index" or found(browser, "zero3") > 3


def found(browser, word):
    """Search the site for a word, and return the number of results on display."""
    browser.evaluate("document.querySelector('#__search').click()")
    typed = "new KeyboardEvent('keyup', {bubbles: true})"
    browser.evaluate(f"field = document.querySelector('.md-search__input'); field.value = '{word}'; field.focus()")
    until = time.monotonic() + 30
    while not (count := browser.evaluate("document.querySelectorAll('.md-search-result__item').length")):
        assert time.monotonic() < until
        browser.evaluate(f"field.dispatchEvent({typed}), null")
        time.sleep(0.2)
    return count


@pytest.mark.parametrize("module", PUBLIC)
def test_names_in_docstrings_exist(module):
    """`jdp.…`, `Class.…` and `file.py` in the docstrings of public names."""
    assert list(unresolved(importlib.import_module(module))) == []


def unresolved(module):
    public = {each: getattr(module, each) for each in getattr(module, "__all__", ())}
    documented = {module.__name__: module, **public}
    for value in list(public.values()):
        if inspect.isclass(value):
            documented |= {f"{value.__name__}.{each}": one for each, one in vars(value).items() if each[0] != "_"}
    for where, value in documented.items():
        for word in re.findall(r"`([\w./]+)(?:\(.*?\))?`", inspect.getdoc(value) or ""):
            if not is_there(word):
                yield f"the docstring of {where} names `{word}`"


def is_there(word):
    """Return False for a name of jdp's, or a file, that does not exist; True for all other words."""
    if word.endswith(".py"):
        return any(path.as_posix().endswith(f"/{word}") for path in ROOT.rglob("*.py"))
    first, _, rest = word.partition(".")
    if first != "jdp" and not (rest and first[:1].isupper() and first in jdp.__all__):
        return True
    name = word if first == "jdp" else f"jdp.{word}"
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):  # a field without a default is no attribute of its class
        owner, _, field = name.rpartition(".")
        of_class = owner != "jdp" and is_there(owner)
        return of_class and field in vars(pkgutil.resolve_name(owner)).get("__annotations__", {})
    return True
