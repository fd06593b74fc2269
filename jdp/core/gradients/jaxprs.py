"""Reading jaxprs: what an operation runs inside, all operations in order, and the user's line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from jdp.core.paths import PACKAGE


def inner_jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs that an operation runs: a loop's body, a branch, a called function."""
    return jaxprs_in_params(eqn.params)


def every_eqn(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All operations, those inside an operation after it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from every_eqn(inner)


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many are carried."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    constants, carried, _ = eqn.params["ft_in"].unpack()  # since jax 0.12: trees, whose length is that of their leaves
    return len(constants), len(carried)


def line_of(eqn: JaxprEqn) -> str:
    """`file:line (function)` of the innermost frame that is no installed package's and not ours."""
    frames = source_info_util.summarize(eqn.source_info, num_frames=64).splitlines()[::-1]
    own = [frame for frame in frames if "site-packages" not in frame and not frame.startswith(_OWN)]
    return re.sub(r":(\d+):\d+ ", r":\1 ", (own or frames or ["an unknown line"])[0])  # without the column


_OWN = f"{PACKAGE}{os.sep}"
