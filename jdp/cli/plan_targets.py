"""`jdp plan --target A,B,C`: plans for several targets side by side, as a table, as JSON and as a page."""

from typing import TYPE_CHECKING

from jdp.cli.options import UsageError, words
from jdp.cli.plan_compile import Plans
from jdp.cli.plan_options import Options

if TYPE_CHECKING:
    from jdp.foresight.advice.scaling import Scaling


def check_targets(options: Options) -> list[str | None]:
    """Return the names of --target; None for this machine's devices.

    Args:
        options: the command's.

    Raises:
        UsageError: no name, one twice, or --trace, which shows one target's step, with several.
    """
    if options.target is None:
        return [None]
    targets = words(options.target, "--target")
    if len(targets) > 1 and options.trace is not None:
        raise UsageError(f"--trace shows the step of one target; given {len(targets)}: name one --target, or remove it")
    return [*targets]


def scaling_of(plans: Plans) -> "Scaling":
    """Return several plans side by side.

    Args:
        plans: for two targets or more.
    """
    from jdp.foresight.advice.scaling import Scaling

    return Scaling(plans.reports)


def show(plans: Plans, scaling: "Scaling | None") -> None:
    """Print one plan with everything in it, or several as a table of one row each.

    Args:
        plans: for one target or more.
        scaling: of several; None of one.
    """
    from jdp.cli.terminal import show_plan, show_table

    if scaling is None:
        show_plan(plans.reports[0], plans.name, plans.described[0])
        return
    show_table(f"{plans.name} on {len(plans.reports)} targets (simulated)", scaling.headings, scaling.table())
    print()
    bills = [report.bill.assumed for report in plans.reports if report.bill is not None][:1]
    print(*scaling.why, *bills, *(f"Note: {note}" for note in scaling.notes), sep="\n")
    print(f"Why, and every candidate: jdp plan {plans.stem}.toml with one --target.")


def page_of(plans: Plans, scaling: "Scaling") -> str:
    """Return the page of several plans.

    Args:
        plans: for two targets or more.
        scaling: of them.
    """
    from jdp.report.scaling_page import scaling_page

    return scaling_page(scaling, title=f"{plans.stem} on {len(plans.reports)} targets", described=plans.described[0])
