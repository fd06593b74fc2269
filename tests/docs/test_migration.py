"""The pages on migrating tell the truth: each loop and its counterpart run, and end with the same loss."""

import re
import warnings

import pytest
from paths import ROOT

PAGES = sorted((ROOT / "jdp" / "core").glob("migrating*.md"))
BLOCKS = {
    page.name: dict(re.findall(r"```python ?([\w ]*)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S))
    for page in PAGES
}
LOOPS = [(name.removesuffix(" before"), page) for page in BLOCKS for name in BLOCKS[page] if name.endswith(" before")]


@pytest.mark.parametrize(("loop", "page"), LOOPS)
def test_both_loops_end_with_the_same_loss(loop, page):
    names, blocks = {}, BLOCKS[page]
    exec(compile(blocks[""], page, "exec"), names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pmap, which people migrate from
        exec(compile(blocks[f"{loop} before"], page, "exec"), names)
    before = float(names["loss"])
    exec(compile(blocks[f"{loop} after"], page, "exec"), names)
    assert float(names["loss"]) == pytest.approx(before, rel=1e-4)  # ten steps of Adam, sums in another order
    assert names["plan"].strategy != "ddp" or loop == "pmap"
