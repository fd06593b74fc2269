"""The page of `jdp plan` for several targets: one row each, and how speed and efficiency go with devices."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from jdp.base.formatting import format_rate
from jdp.foresight.advice.scaling import Scaling
from jdp.foresight.cost.bill import format_amount, format_days
from jdp.foresight.forecast import PlanReport
from jdp.report.charts import FAINT, chart, inline
from jdp.report.headline import Number, numbers
from jdp.report.page import BLUE, Markup, Section, element, joined, page, paragraphs, table


def scaling_page(scaling: Scaling, *, title: str, described: str = "") -> str:
    """Return the page as HTML text, which needs nothing else."""
    lead = "Compiled, not run; one row a target: the fastest candidate that fits."
    sections = [Section("compared", "The targets compared", _compared(scaling))]
    sections += [
        Section(f"target-{number}", report.target, paragraphs([_take(report), *report.why]))
        for number, report in enumerate(scaling.reports, 1)
    ]
    return page(title, sections, lead=f"{described}. {lead}" if described else lead)


def _compared(scaling: Scaling) -> Markup:
    fastest = max(scaling.reports, key=lambda report: report.speed or 0.0)
    best = [report is fastest and report.speed is not None for report in scaling.reports]
    rows = table(
        scaling.headings, scaling.table(), words=("take",), classes=["chosen" if each else None for each in best]
    )
    bills = [report.bill.assumed for report in scaling.reports if report.bill is not None][:1]
    notes = paragraphs([*bills, *(f"Note: {note}" for note in scaling.notes)], "note")
    return joined([numbers(_numbers(scaling)), paragraphs(scaling.why), rows, _pictures(scaling), notes])


def _numbers(scaling: Scaling) -> list[Number]:
    """Return the smallest that fits, the fastest, and the least money or device-hours."""
    fitting = [report for report in scaling.reports if report.choice is not None and report.choice.fits]
    found = list[Number]()
    if fitting:
        least = min(fitting, key=lambda report: report.devices)
        found.append(("smallest that fits", least.target, "of these, by the compiled sizes"))
    if timed := [(speed, report) for report in scaling.reports if (speed := report.speed) is not None]:
        speed, fastest = max(timed, key=lambda pair: pair[0])
        found.append(("fastest", fastest.target, f"{format_rate(speed)} {fastest.unit} a second"))
    if paid := [report.bill for report in scaling.reports if report.bill is not None]:
        shortest, cheapest = min(paid, key=lambda bill: bill.seconds), min(paid, key=lambda bill: bill.device_hours)
        found.append(("shortest", format_days(shortest.seconds), f"with {shortest.devices:,}"))
        money = cheapest.money
        hours = f"{format_amount(cheapest.device_hours)} device-hours"
        name, value = ("least device-hours", hours) if money is None else ("least money", format_amount(money))
        found.append((name, value, f"{format_days(cheapest.seconds)} with {cheapest.devices:,}"))
    return found


def _take(report: PlanReport) -> Markup:
    return element("strong", "Nothing fits." if report.choice is None else f"Take {report.choice.name}.")


# The pictures.


def _pictures(scaling: Scaling) -> Markup:
    """Draw speed and efficiency over devices; nothing where fewer than two sizes have a speed."""
    timed = sorted(
        (report for report in scaling.reports if report.speed is not None), key=lambda report: report.devices
    )
    if len({report.devices for report in timed}) < 2:
        return Markup()
    unit, of_first = scaling.reports[0].unit, scaling.reports[0].target
    speeds = [report.speed or 0.0 for report in timed]
    efficiencies = [100 * (scaling.efficiency(report) or 0.0) for report in timed]
    drawn = [
        (f"{unit.capitalize()} a second; dashed: in proportion to {of_first}", _speed_chart(scaling, timed, speeds)),
        (f"Efficiency in percent: {unit} a second and device over {of_first}", _percent_chart(timed, efficiencies)),
    ]
    figures = [element("figure", element("figcaption", words), picture) for words, picture in drawn]
    return element("div", *figures, class_="charts")


def _speed_chart(scaling: Scaling, timed: Sequence[PlanReport], speeds: Sequence[float]) -> Markup:
    figure, (axes,) = chart(width=4.4, height=2.9)
    devices = [report.devices for report in timed]
    first = next(report for report in scaling.reports if report.speed is not None)
    each = (first.speed or 0.0) / first.devices
    axes.plot(devices, [each * count for count in devices], color=FAINT, linestyle=(0, (4, 3)), linewidth=1.2)
    ranges = [_speed_range(report) for report in timed]
    if all(span is not None for span in ranges):
        ends = [span for span in ranges if span is not None]
        axes.fill_between(devices, [low for low, _ in ends], [high for _, high in ends], color=BLUE, alpha=0.18)
    axes.plot(devices, speeds, color=BLUE, marker="o")
    axes.set_yscale("log", base=10)
    axes.yaxis.set_major_formatter(lambda value, _: format_rate(value))
    axes.yaxis.set_minor_formatter(lambda *_: "")
    _devices_axis(axes, devices)
    words = ", ".join(f"{report.target} {format_rate(speed)}" for report, speed in zip(timed, speeds, strict=True))
    return inline(figure, f"Speed over devices: {words}; the band is the error of the times.")


def _speed_range(report: PlanReport) -> tuple[float, float] | None:
    choice = report.choice
    if choice is None or choice.step_range is None:
        return None
    least, most = choice.step_range
    return choice.tokens / most, choice.tokens / least


def _percent_chart(timed: Sequence[PlanReport], efficiencies: Sequence[float]) -> Markup:
    figure, (axes,) = chart(width=4.4, height=2.9)
    devices = [report.devices for report in timed]
    axes.plot(devices, efficiencies, color=BLUE, marker="o")
    axes.set_ylim(0, 1.08 * max(100.0, *efficiencies))
    _devices_axis(axes, devices)
    pairs = zip(timed, efficiencies, strict=True)
    return inline(figure, f"Efficiency: {', '.join(f'{report.target} {each:.0f} percent' for report, each in pairs)}.")


def _devices_axis(axes: Axes, devices: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(devices)), [f"{count:,}" for count in sorted(set(devices))])
    axes.xaxis.set_minor_formatter(lambda *_: "")
    axes.set_xlabel("devices")
