"""Every picture that a test of pages or lessons draws is readable: labels apart from one another, data in its axes."""

import itertools

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.text import Text

PLACES = ("lessons", "report")
"""Folders of tests that draw."""


class Checked(FigureCanvasSVG):
    """The canvas by which `jdp.report.charts` writes all pictures, which looks at the figure first."""

    def print_svg(self, *args, **settings):
        assert unreadable(self.figure) == []
        return super().print_svg(*args, **settings)


def unreadable(figure):
    """Return what cannot be read in a figure: labels over one another, markup in place of text, axes without data."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = {text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()} - _beyond(figure)
    boxes = sorted(((text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts), key=str)
    wrong = [f"{text!r} is markup" for text, _ in boxes if "\\math" in text]
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        width, height = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        smaller = min(a.width * a.height, b.width * b.height)
        if width > 0 and height > 0 and width * height > 0.2 * smaller:
            wrong.append(f"{one!r} lies over {other!r}")
    return wrong + ["axes without data" for axes in figure.axes if axes.axison and not axes.has_data()]


def _beyond(figure):
    """Return the labels of ticks beyond the limits of their axis: matplotlib keeps them, and draws none."""
    found = set()
    for axes in figure.axes:
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            for tick in (*axis.majorTicks, *axis.minorTicks):
                shown = axes.axison and axis.get_visible() and min(low, high) <= tick.get_loc() <= max(low, high)
                found |= set() if shown else {tick.label1, tick.label2}
    return found


@pytest.fixture(autouse=True)
def _pictures_are_readable(request, monkeypatch):
    of_a_page = request.path.parent.name in PLACES and "1e+99" not in request.node.name  # a loss of 1e99 is no picture
    if of_a_page:
        monkeypatch.setattr("jdp.report.charts.FigureCanvasSVG", Checked)
