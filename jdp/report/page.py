"""The skeleton of a self-contained HTML page: its markup, its look, its few lines of script.

1. `element` writes one element. Text is escaped; only what is `Markup` already is not, so that nothing that comes from
   outside can become part of the page by being forgotten. Control characters and those that turn the direction of the
   text around are shown as `\\x1b` and `\\u202e`: a name cannot pass for another one.
2. `table` and `details` are the two blocks that every report has.
3. `page` joins sections under one head. Nothing is loaded: the style, the script and the pictures are in the page, and
   its content security policy has the browser refuse anything else.

Pages follow the reader's light or dark setting, and read without scripts: a script only adds the zoom of timelines.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape as escaped_html

_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
_VOID = frozenset(("br", "hr", "input", "meta"))


class Markup(str):
    """Text that is HTML already, and is not escaped again."""

    __slots__ = ()


def escape(text: str, *, quote: bool = True) -> str:
    """Return text for HTML, with its unseen characters as Python writes them."""
    return escaped_html(_UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text), quote=quote)


def element(tag: str, *children: str, **attributes: str | int | bool | None) -> Markup:
    """`<tag attributes>children</tag>`; children that are no `Markup` are escaped.

    Attributes that are Python words end in "_" (`class_`), and other underscores stand for hyphens. One that is True is
    written without a value; one that is None or False is left out.
    """
    written = "".join(
        f" {_hyphens(name)}" if value is True else f' {_hyphens(name)}="{escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    if tag in _VOID:
        assert not children, tag
        return Markup(f"<{tag}{written}>")
    return Markup(f"<{tag}{written}>{joined(children)}</{tag}>")


def joined(parts: Sequence[str], between: str = "") -> Markup:
    """Join the parts, each escaped unless it is `Markup`."""
    return Markup(between.join(part if isinstance(part, Markup) else escape(part, quote=False) for part in parts))


def _hyphens(name: str) -> str:
    return name.removesuffix("_").replace("_", "-")


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str = "",
    words: Collection[str] = (),
    classes: Sequence[str | None] = (),
) -> Markup:
    """Return a table that scrolls sideways when it is wider than the page."""
    left = [index == 0 or header in words for index, header in enumerate(headers)]
    head = [element("th", text, scope="col", class_=_side(side)) for text, side in zip(headers, left, strict=True)]
    body = list[str]()
    for row, kind in zip(rows, classes or [None] * len(rows), strict=True):
        first, *others = row
        cells = [element("th", first, scope="row")]
        cells += [element("td", text, class_=_side(side)) for text, side in zip(others, left[1:], strict=True)]
        body.append(element("tr", *cells, class_=kind))
    head_caption = [element("caption", caption)] if caption else []
    whole = element("table", *head_caption, element("thead", element("tr", *head)), element("tbody", *body))
    return element("div", whole, class_="wide", tabindex=0)


def _side(left: bool) -> str | None:
    return "words" if left else None


def details(summary: str, *children: str, is_open: bool = False) -> Markup:
    """Return a part that the reader opens."""
    return element("details", element("summary", summary), *children, open=is_open)


CHOSEN = "chosen"
"""The word behind the name of the candidate to take."""


def tagged(text: str, tag: str | None) -> Markup:
    """Text with a word behind it that stands out; None: no such word."""
    return joined([text] if tag is None else [text, " ", element("span", tag, class_="tag good")])


def key(text: str, colour: str) -> Markup:
    """Return an entry of a picture's legend."""
    return element("span", element("i", style=f"background:{colour}"), text, class_="key")


def paragraphs(texts: Sequence[str], class_: str | None = None) -> Markup:
    return joined([element("p", text, class_=class_) for text in texts])


@dataclass(frozen=True)
class Section:
    """A part of a page under a heading; `anchor` is its id, which links point to."""

    anchor: str
    heading: str
    body: Markup


def page(title: str, sections: Sequence[Section], *, lead: str = "") -> str:
    """Return a whole page as HTML text."""
    links = [element("a", section.heading, href=f"#{section.anchor}") for section in sections[1:]]
    parts = [
        element("h1", title),
        *([element("p", lead, class_="lead")] if lead else []),
        *([element("nav", *links)] if links else []),
        *(element("section", element("h2", s.heading), s.body, id=s.anchor) for s in sections),
    ]
    # Nothing but this page's own style and its one script.
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Markup(CSS)),
    )
    body = element("body", element("main", *parts), element("script", Markup(SCRIPT)))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


# Colours: Okabe and Ito, "Color Universal Design" (2008), distinguishable with every common colour blindness.
BLUE, VERMILION, GREEN, SKY = "#0072b2", "#d55e00", "#009e73", "#56b4e9"
ORANGE, PURPLE, GREY, PALE, YELLOW = "#e69f00", "#cc79a7", "#7f7f7f", "#c0c0c0", "#f0e442"

_LIGHT = """color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --faint: #59636e; --line: #d1d9e0;
  --raised: #f4f6f8; --good: #ddf4e4; --good-ink: #0b5d33; --bad: #ffe5df; --bad-ink: #a3200d;"""
_DARK = """--paper: #14171b; --ink: #e4e8ec; --faint: #9aa5b1; --line: #363e47; --raised: #1d2228;
  --good: #123524; --good-ink: #7fe0a8; --bad: #431a13; --bad-ink: #ffab9c;"""
_TEXT = "background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;"
_LOOK = f"""
* {{ box-sizing: border-box; }}
h1 {{ font-size: 1.5rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.2rem; margin: 2.5rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--line); }}
h3 {{ font-size: 1rem; margin: 1.5rem 0 .35rem; overflow-wrap: anywhere; }}
p {{ margin: .4rem 0; max-width: 62rem; overflow-wrap: anywhere; }}
a {{ color: inherit; }}
nav {{ display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: .75rem 0; }}
.lead, .note, figcaption, caption, summary {{ color: var(--faint); }}
.note, figcaption, caption {{ font-size: .87rem; }}
.answer {{ border-left: 4px solid {GREEN}; background: var(--raised); padding: .6rem 1rem; margin: 1rem 0; }}
.answer.none {{ border-color: {VERMILION}; }}
.answer strong {{ font-size: 1.15rem; }}
.numbers {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem 1.25rem;
  margin: 1rem 0; }}
.number dt {{ color: var(--faint); font-size: .87rem; }} .number dd {{ margin: 0; overflow-wrap: anywhere; }}
.number dd:not(.note) {{ font-size: 2.1rem; line-height: 1.2; font-weight: 650; }}
.number .note {{ line-height: 1.35; }}
.breach {{ background: var(--bad); color: var(--bad-ink); padding: .4rem .75rem; border-left: 4px solid {VERMILION}; }}
.tag {{ border-radius: 3px; padding: 0 .4em; font-size: .85em; font-weight: 600; white-space: nowrap; }}
.tag.good {{ background: var(--good); color: var(--good-ink); }}
.tag.bad {{ background: var(--bad); color: var(--bad-ink); }}
.wide {{ overflow-x: auto; margin: .6rem 0 1rem; }}
table {{ border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }}
caption {{ text-align: left; padding-bottom: .3rem; caption-side: top; }}
th, td {{ padding: .22rem .5rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top;
  white-space: nowrap; }}
thead th {{ color: var(--faint); font-weight: 500; }}
th[scope=row], .words {{ text-align: left; }}
th[scope=row] {{ font-weight: 600; padding-left: .4rem; white-space: normal; overflow-wrap: anywhere;
  min-width: 7rem; }}
td.words {{ white-space: normal; overflow-wrap: break-word; max-width: 28rem; }}
tr.chosen {{ background: var(--good); }}
tr.bad td, tr.bad th {{ color: var(--bad-ink); }}
tr.total td, tr.total th {{ font-weight: 600; border-top: 2px solid var(--line); }}
summary {{ cursor: pointer; margin: .35rem 0; overflow-wrap: anywhere; }}
pre {{ overflow-x: auto; background: var(--raised); padding: .75rem 1rem; font-size: .83rem; line-height: 1.45; }}
figure {{ margin: .75rem 0; }}
figure svg {{ display: block; }}
figure.picture svg, .charts figure > svg {{ width: 100%; height: auto; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: 0 1.5rem; }}
.charts figure {{ min-width: 0; }}
.charts strong {{ color: var(--ink); }}
.key {{ display: inline-flex; align-items: center; gap: .4em; margin-right: 1.1em; white-space: nowrap; }}
.key.run {{ white-space: normal; overflow-wrap: anywhere; }}
.key svg {{ width: 28px; height: 10px; flex: none; }}
.legend {{ font-size: .87rem; }}
.key i {{ width: .9em; height: .9em; border-radius: 2px; display: inline-block; }}
.lanes {{ display: grid; grid-template-columns: 8.5rem minmax(0, 1fr); font-size: .8rem; color: var(--faint); }}
.lanes .names {{ display: grid; grid-template-rows: 26px 26px 1.4rem; align-items: center; }}
.lanes .scroll {{ overflow-x: auto; }}
.lanes .strip {{ position: relative; width: calc(100% * var(--zoom, 1)); height: calc(52px + 1.4rem);
  overflow: hidden; }}
.lanes svg {{ width: 100%; height: 52px; background: var(--raised); }}
.lanes .strip span {{ position: absolute; white-space: nowrap; }}
.lanes .tick {{ top: 52px; padding-left: 3px; border-left: 1px solid var(--line); }}
.lanes .fine {{ display: none; }} .zoomed .lanes .fine {{ display: block; }}
.lanes .times {{ color: var(--ink); background: var(--paper); border-radius: 3px; padding: 0 4px; margin: 3px 4px;
  line-height: 16px; font-weight: 600; pointer-events: none; }}
.compute {{ fill: {BLUE}; background: {BLUE}; }} .merged {{ fill-opacity: .62; }}
.all-gather {{ fill: {SKY}; background: {SKY}; }} .reduce-scatter {{ fill: {ORANGE}; background: {ORANGE}; }}
.all-reduce {{ fill: {PURPLE}; background: {PURPLE}; }} .other {{ fill: {GREY}; background: {GREY}; }}
.waiting {{ fill: {VERMILION}; background: {VERMILION}; }} .rest {{ fill: var(--line); background: var(--line); }}
.zoomed rect {{ stroke: var(--raised); stroke-width: .5px; vector-effect: non-scaling-stroke; }}
.lanes rect:hover {{ fill: {YELLOW}; fill-opacity: 1; }}
@media (min-width: 52rem) {{ .charts .large {{ grid-column: span 2; grid-row: span 2; }}
  .charts .large text {{ font-size: 6px !important; }} }}
@media (max-width: 40rem) {{
  figure.picture {{ overflow-x: auto; }} figure.picture svg {{ min-width: 44rem; }}
  .lanes {{ grid-template-columns: 6.3rem minmax(0, 1fr); }}
  .lanes .odd {{ display: none; }} .zoomed .lanes .odd {{ display: block; }} }}
"""
CSS = f"""
:root {{ {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
body {{ margin: 0; {_TEXT} }}
main {{ max-width: 80rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }}
@media (max-width: 40rem) {{ main {{ padding: 1rem .8rem 3rem; }} }}
{_LOOK}"""
"""The look of a page."""
# Timelines widen together about their middle, and scroll together.
SCRIPT = """
for (const zoom of document.querySelectorAll("label.zoom")) {
  const group = zoom.parentElement, strips = [...group.querySelectorAll(".scroll")], first = strips[0];
  zoom.hidden = false;
  zoom.querySelector("input").addEventListener("input", event => {
    const middle = (first.scrollLeft + first.clientWidth / 2) / first.scrollWidth;
    group.style.setProperty("--zoom", 2 ** event.target.value);
    group.classList.toggle("zoomed", event.target.value > 2.5);
    first.scrollLeft = middle * first.scrollWidth - first.clientWidth / 2;
  });
  for (const strip of strips)
    strip.addEventListener("scroll", () => strips.forEach(other => { other.scrollLeft = strip.scrollLeft; }));
}
"""
