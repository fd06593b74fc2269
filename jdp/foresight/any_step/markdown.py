"""A step's numbers as a table in GitHub's Markdown."""

from jdp.base.formatting import format_bytes, format_seconds
from jdp.core.sharding.axes import factors
from jdp.foresight.any_step.baseline import Baseline
from jdp.foresight.any_step.compare import PARTS, markdown_table


def report_markdown(step: Baseline) -> str:
    """Return what a step sends by line, holds and waits for."""
    held = step.held
    rows = [("sent a device", "", format_bytes(step.wire_bytes))]
    rows += [
        (each.kind, f"`{each.source}`" if each.source else "", format_bytes(each.wire_bytes)) for each in step.sent
    ]
    fits = {None: "", True: "fits", False: "more than a device has"}[held.fits]
    rows += [("held a device", fits, format_bytes(held.total))]
    rows += [(f"of it {part}", "", format_bytes(getattr(held, part))) for part in PARTS]
    rows += [("held in the host's memory", "", format_bytes(held.host))] if held.host else []
    if step.step_seconds is not None:
        rows.append(("time of a step, simulated", "", format_seconds(step.step_seconds)))
    title = f"**jdp verify** `{step.program}` on {factors(step.mesh)} for `{step.target}`"
    return f"{title}\n\n{markdown_table(('', 'at', 'value'), rows)}"
