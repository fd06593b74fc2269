"""Several targets side by side: what the choice on each of them is, how fast, and at which efficiency and price."""

from dataclasses import dataclass
from typing import Any

from jdp.base.formatting import format_percent, format_rate, format_seconds
from jdp.foresight.cost.bill import format_amount, format_days
from jdp.foresight.forecast import Estimate, PlanReport

HEADINGS = ("target", "devices", "take", "fits", "tokens a step", "step", "tokens/s", "hidden", "efficiency")
BILL = ("days", "device-hours", "money")
"""More headings, where a number of tokens is given; the last where a price is."""


@dataclass(frozen=True)
class Scaling:
    """Plans of one experiment for several targets, in the order given."""

    reports: tuple[PlanReport, ...]  # two or more

    @property
    def headings(self) -> tuple[str, ...]:
        """Of `table`: what the batch is counted in, and the bill where there is one."""
        plain = tuple(heading.replace("tokens", self.reports[0].unit) for heading in HEADINGS)
        return (*plain, *BILL[: self._bill_columns])

    @property
    def _bill_columns(self) -> int:
        bills = [report.bill for report in self.reports if report.bill is not None]
        return 0 if not bills else 2 if bills[0].money is None else 3

    def efficiency(self, report: PlanReport) -> float | None:
        """Return tokens a second and device over those of the first target that has a speed; None where it has none."""
        each = [speed / other.devices for other in self.reports if (speed := other.speed) is not None]
        return None if report.speed is None else report.speed / report.devices / each[0]

    def table(self) -> list[tuple[str, ...]]:
        """Return a row for each target, under `headings`."""
        return [self._row(report) for report in self.reports]

    def _row(self, report: PlanReport) -> tuple[str, ...]:
        shown = report.choice or report.estimates[0]
        fits, efficiency = shown.fits_in_words, self.efficiency(report)
        if report.choice is None:
            fits = "no" if any(estimate.error is None for estimate in report.estimates) else "did not compile"
        speed = ("–", "–", "–", "–") if efficiency is None else _speed_cells(shown, efficiency)
        bill = ("–",) * 3
        if report.bill is not None:
            money = "–" if report.bill.money is None else format_amount(report.bill.money)
            bill = (format_days(report.bill.seconds), format_amount(report.bill.device_hours), money)
        name = "–" if report.choice is None else report.choice.name
        row = (report.target, f"{report.devices:,}", name, fits, f"{shown.tokens:,}", *speed)
        return (*row, *bill[: self._bill_columns])

    @property
    def why(self) -> tuple[str, ...]:
        """Sentences: what is compared with what, the smallest that fits, what the batch means for it."""
        batches = {report.estimates[0].tokens for report in self.reports}
        same = "The global batch is the same on all" if len(batches) == 1 else "The global batch differs"
        sentences = [
            f"{same}: --train.batch_size changes it; what a device has to compute shrinks as devices are added, and "
            f"efficiency, {self.reports[0].unit} a second and device over those of the first, with it."
        ]
        fitting = [report for report in self.reports if report.choice is not None and report.choice.fits]
        if fitting:
            least = min(fitting, key=lambda report: report.devices)
            assert least.choice is not None
            sentences.append(
                f"The smallest of these that it fits, by the compiled sizes: {least.target}, under {least.choice.name}."
            )
        beyond = dict.fromkeys(str(report.smallest) for report in self._firsts_of_a_kind if report.smallest is not None)
        sentences += beyond
        paid = [(report.bill.device_hours, report) for report in self.reports if report.bill is not None]
        if paid:
            hours, best = min(paid, key=lambda pair: pair[0])
            sentences.append(f"Fewest device-hours: {format_amount(hours)}, on {best.target}.")
        return tuple(sentences)

    @property
    def _firsts_of_a_kind(self) -> list[PlanReport]:
        """The first report for each kind of device: of others of the kind the smallest cluster is foreseen too."""
        kinds = dict[str, PlanReport]()
        for report in self.reports:
            kinds.setdefault(report.target.rpartition(":")[0], report)
        return [*kinds.values()]

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of all targets, each once, those that some have only with these targets' names."""
        named = dict[str, list[str]]()
        for report in self.reports:
            for note in report.notes:
                named.setdefault(note, []).append(report.target)
        everywhere = len(self.reports)
        return tuple(note if len(on) == everywhere else f"{', '.join(on)}: {note}" for note, on in named.items())

    def to_json(self) -> dict[str, Any]:
        """Return the object that `jdp plan --target A,B --json` prints: each target's own, and what compares them."""
        return {
            "targets": [report.to_json() for report in self.reports],
            "scaling": [
                {
                    "target": report.target,
                    "devices": report.devices,
                    "choice": None if report.choice is None else report.choice.name,
                    "fits": None if report.choice is None else report.choice.fits,
                    "tokens_per_step": report.estimates[0].tokens,
                    "step_seconds": None if report.choice is None else report.choice.step_seconds,
                    "tokens_per_second": report.speed,
                    "efficiency": self.efficiency(report),
                }
                for report in self.reports
            ],
            "why": " ".join(self.why),
        }


def _speed_cells(choice: Estimate, efficiency: float) -> tuple[str, ...]:
    sends = choice.timeline is not None and choice.timeline.communication_seconds
    hidden = format_percent(1 - (choice.exposed_fraction or 0.0)) if sends else "–"
    step, speed = format_seconds(choice.step_seconds or 0.0), format_rate(choice.tokens_per_second or 0.0)
    return step, speed, hidden, format_percent(efficiency)
