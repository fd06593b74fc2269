"""The migration page tells the truth: each loop and its counterpart run, and end with the same loss."""

import re
import warnings
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "jdp" / "core" / "migrating.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"```python ?([\w ]*)\n(.*?)```", PAGE, flags=re.S))
LOOPS = [name.removesuffix(" before") for name in BLOCKS if name.endswith(" before")]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_and_its_counterpart_end_with_the_same_loss(loop):
    names = {}
    exec(compile(BLOCKS[""], "migrating.md", "exec"), names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pmap, which people migrate from
        exec(compile(BLOCKS[f"{loop} before"], "migrating.md", "exec"), names)
    before = float(names["loss"])
    exec(compile(BLOCKS[f"{loop} after"], "migrating.md", "exec"), names)
    assert float(names["loss"]) == pytest.approx(before, rel=1e-4)  # ten steps of Adam, sums in another order
    assert names["plan"].strategy != "ddp" or loop == "pmap"
