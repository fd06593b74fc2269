"""Pages in a real browser: they load nothing, log nothing, and can be read at any width, in light and in dark."""

import functools

import pytest
from chromium import MISSING, Chromium, find_chromium
from test_plan_page import forecast_of, outlook_of
from test_run_page import compiled, rows_of, run_of

from jdp.report.pages import plan_page, run_page

pytestmark = pytest.mark.skipif(find_chromium() is None, reason=MISSING)

NAME = "a-rather-long-name-of-a-run-optimizer.lr=0.003-train.batch_size=256-seed=1"
PAGES = {
    "run": lambda: run_page([run_of(step=compiled(), rows=rows_of(mfu=0.4))]),
    "runs": lambda: run_page([run_of(NAME, step=compiled()), *(run_of(f"run-{i}") for i in range(9))]),
    "nothing": lambda: run_page([run_of(rows=[], history=(), toml="x" * 5000, settings={"x": "y" * 500})]),
    "plan": lambda: plan_page(forecast_of(outlook_of(), outlook_of("zero3")), title="t"),
}
LOOKS = {"wide": {}, "dark": {"dark": True}, "phone": {"width": 390, "height": 844}, "tablet": {"width": 820}}

SMALLEST = 8.0
"""Pixels of the smallest letters of a picture on a phone: those of a map's street names."""

LETTERS = """
[...document.querySelectorAll("figure svg text")].map(text => {
  const svg = text.ownerSVGElement, scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  return scale * parseFloat(getComputedStyle(text).fontSize);
})
"""
BEYOND = """
[...document.querySelectorAll("main *")].filter(one => {
  const scrolls = one.closest(".wide, .scroll, pre, figure.picture"), width = document.documentElement.clientWidth;
  return !scrolls && one.getClientRects().length && one.getBoundingClientRect().right > width + 1;
}).map(one => one.outerHTML.slice(0, 100))
"""
CONTRAST = """
(() => {
  const light = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255)
    .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const paper = light(getComputedStyle(document.body).backgroundColor);
  const words = [...document.querySelectorAll("h1, p, figcaption, td, th, summary, pre, figure svg text")];
  return Math.min(...words.filter(one => one.getClientRects().length).map(one => {
    const style = getComputedStyle(one);
    const ink = light(one instanceof SVGElement ? style.fill : style.color);
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  }));
})()
"""
READABLE = 4.5
"""Contrast of text and paper: WCAG 2.2, success criterion 1.4.3."""


@pytest.fixture(scope="module")
def browser():
    with Chromium() as started:
        yield started


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages, each written when it is first asked for."""
    folder = tmp_path_factory.mktemp("pages")

    @functools.cache
    def page(name):
        (folder / f"{name}.html").write_text(PAGES[name](), encoding="utf-8")
        return folder / f"{name}.html"

    return page


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_readable_and_quiet(browser, pages, name, look):
    browser.open(pages(name), **LOOKS[look])
    assert browser.errors == []
    assert browser.requests == [pages(name).as_uri()], "nothing but the page itself is loaded"
    root = "document.documentElement"
    assert browser.evaluate(f"{root}.scrollWidth <= {root}.clientWidth"), "it does not scroll sideways"
    assert browser.evaluate(BEYOND) == [], "what is wider than the window scrolls by itself"
    assert browser.evaluate(CONTRAST) >= READABLE
    assert look != "phone" or min(browser.evaluate(LETTERS), default=SMALLEST) >= SMALLEST
    assert browser.evaluate("document.querySelectorAll('section h2').length") >= 4


def test_the_timeline_widens_with_its_slider(browser, pages):
    """The one script of a page runs under the page's own security policy."""
    browser.open(pages("run"))
    width = "document.querySelector('.strip').clientWidth"
    before = browser.evaluate(width)
    moved = "s => { s.value = 2; s.dispatchEvent(new Event('input')); }"
    browser.evaluate(f"({moved})(document.querySelector('.zoom input'))")
    assert browser.evaluate(width) == pytest.approx(4 * before, abs=4)
    assert browser.errors == []
