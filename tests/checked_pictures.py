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
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts if _is_drawn(text)]
    wrong = [f"{text!r} is markup" for text, _ in boxes if "\\math" in text]
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        width, height = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        smaller = min(a.width * a.height, b.width * b.height)
        if width > 0 and height > 0 and width * height > 0.2 * smaller:
            wrong.append(f"{one!r} lies over {other!r}")
    return wrong + ["axes without data" for axes in figure.axes if axes.axison and not axes.has_data()]


def _is_drawn(text):
    """Return False for labels of ticks beyond the limits of their axis: matplotlib keeps them, and draws none."""
    axes = text.axes
    if axes is None or not axes.axison:
        return axes is None
    for axis, limits, at in ((axes.xaxis, axes.get_xlim(), 0), (axes.yaxis, axes.get_ylim(), 1)):
        ticks = [label for tick in (*axis.majorTicks, *axis.minorTicks) for label in (tick.label1, tick.label2)]
        if text in ticks:
            return axis.get_visible() and min(limits) <= text.get_position()[at] <= max(limits)
    return True


@pytest.fixture(autouse=True)
def _pictures_are_readable(request, monkeypatch):
    of_a_page = request.path.parent.name in PLACES and "1e+99" not in request.node.name  # a loss of 1e99 is no picture
    if of_a_page:
        monkeypatch.setattr("jdp.report.charts.FigureCanvasSVG", Checked)
