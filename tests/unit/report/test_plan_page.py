"""The page of a plan: well-formed, self-contained, escaped, small, and with the forecast's numbers in it."""

import dataclasses
from html.parser import HTMLParser
from pathlib import Path

import pytest

import jdp
from jdp.base import formatting
from jdp.base.formatting import format_bytes
from jdp.foresight.foresee import Estimate, PlanReport
from jdp.foresight.memory import Headroom, Memory
from jdp.foresight.program.collectives import Collective
from jdp.foresight.timing.timeline import COMMUNICATION, COMPUTE, Event, Timeline
from jdp.foresight.traffic.contract import MeshCollective, Row
from jdp.foresight.traffic.theory import Promise, Theory
from jdp.foresight.verify import Report
from jdp.report.page import without_roots
from jdp.report.pages import plan_page

VOID = {"br", "hr", "input", "meta"}
HOSTILE = '</title></svg><script>alert("x")</script><img src=http://evil/> & $\\frac{$'


class Reader(HTMLParser):
    """Reads a page and fails at the first tag that is not closed, or closed out of turn."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        assert len(dict(attrs)) == len(attrs), f"an attribute twice: {tag} {attrs}"
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes {self.open[-3:]}"

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def values(self, *names):
        return [value for _, name, value in self.attributes if name in names]


def events_of(count, *, what="jit(train_step)/jvp()/dot_general"):
    """`count` kernels of 1 µs one after the other, and a collective beside every tenth."""
    for i in range(count):
        yield Event(f"fusion.{i}", COMPUTE, i * 1e-6, 1e-6, what, "model.py:7")
        if i % 10 == 0:
            yield Event(f"all-gather.{i}", COMMUNICATION, i * 1e-6, 2e-6, "gather", "model.py:9", bytes=4096.0)


def timeline_of(events):
    events = tuple(events)

    def seconds(lane):
        return sum(e.seconds for e in events if e.lane == lane)

    step = max(e.start + e.seconds for e in events)
    computing, sending = seconds(COMPUTE), seconds(COMMUNICATION)
    return Timeline(step, computing, sending, 0.0, 7.89e12, events=events, caveats=())


MEMORY = Memory(
    parameters=1_234_567_890, optimizer=3_000_000_002, batch=65_536, temporaries=9_876_543_210, code=1_048_577
)


def sent(number, source):
    """Return the collective of this number: the even ones are in a loop."""
    size, name = 1_000_000 * (number + 1), f"ag.{number}"
    one = Collective("all-gather", "bf16", size, ((0, 1, 2, 3),), number % 2 == 0, name, source_lines=(source,))
    return MeshCollective(one, ("data",), number == 0, True)


def report_of(*, kept=True, collectives=60, source="/home/me/loss.py:12", **changed):
    promise = Promise("all-gather", 5e8, ("data",), 4, 1, 2, 250_000_000)
    bound = 12_345_678.0
    wire = bound if kept else 8 * bound
    gathered = Row("all-gather", 5e8, 500_000_000, 1_000_000, wire, bound, kept)
    reduced = Row("all-reduce", 0.0, 12, 0, 24.0, 0.0, True)
    plain = Report(
        kept=kept,
        name="zero1",
        partitioning="manual",
        why="K > 1",
        target="h100:1x4",
        mesh={"data": 4},
        accumulate=4,
        theory=Theory(124_000_000, (promise,)),
        wire_bytes_per_device=wire,
        bound_wire_bytes_per_device=bound,
        ratio=wire / bound,
        rows=(gathered, reduced),
        model_axes=(dataclasses.replace(reduced, kind="all-to-all"),),
        collectives=tuple(sent(number, source) for number in range(collectives)),
        breaches=(),
        symptoms=("the batch was gathered whole (loss.py:3)",),
        notes=("gradients are reduced in f32",),
        memory=MEMORY,
        headroom=ROOM,
        timeline=timeline_of(events_of(200)),
    )
    return dataclasses.replace(plain, **changed)


ROOM = Headroom(True, 60_000_000_000, 77_777_777_777, 0.9, "fits, but set XLA_CLIENT_MEM_FRACTION=0.9")
NO_ROOM = Headroom(False, 90_000_000_000, 77_777_777_777, None, "does not fit: the rest goes to NCCL")


def outlook_of(strategy="zero1", **changed):
    """An estimate; what is no attribute of it is one of its report."""
    own = {name: changed.pop(name) for name in [*changed] if name in OWN}
    report = own.pop("report", None) or report_of(**changed, name=strategy)
    plain = Estimate(strategy, 1, report=report, model_flops=1e15, peak_flops=1e15, tokens=1 << 17)
    return dataclasses.replace(plain, **own)


OWN = {each.name for each in dataclasses.fields(Estimate)}


def forecast_of(*estimates, **changed):
    return PlanReport("h100:1x4", 4, estimates, **changed)


def read(forecast, title="gpt on h100:1x4", **named):
    return Reader(plan_page(forecast, title=title, **named))


def test_the_page_holds_the_answer_and_the_numbers():
    larger = dataclasses.replace(MEMORY, temporaries=88_888_888_888)
    zero3 = outlook_of("zero3", headroom=NO_ROOM, memory=larger)
    found = read(forecast_of(outlook_of(), zero3, notes=("a note on rows",)), described="GPT, 128 rows.")
    for expected in (
        "gpt on h100:1x4",
        "GPT, 128 rows.",
        "Take zero1: a step takes 200 µs.",
        "a note on rows",
        "1.15 GiB",  # each class
        "9.2 GiB",
        "82.8 GiB",
        "72.4 GiB",  # what there is
        format_bytes(MEMORY.total),
        "200 µs",  # the step's seconds
        "7.89 TFLOP",
        "12,345,678",  # bytes on the wire
        "zero1 chosen",
        "zero1 fits, but set XLA_CLIENT_MEM_FRACTION=0.9.",
        "zero3 does not fit: the rest goes to NCCL.",
        "/home/me/loss.py:12",
        "the batch was gathered whole (loss.py:3)",
        "gradients are reduced in f32",
    ):
        assert expected in found.text, expected


def test_paths_begin_at_their_package():
    """Of this clone, and of what is installed; the file of a script elsewhere is named whole."""
    installed, own, elsewhere = f"{pytest.__file__}:1", f"{formatting.__file__}:2", "/home/me/loss.py:12"
    events = tuple(Event("k", COMPUTE, i * 1.0, 1.0, "add", source) for i, source in enumerate((installed, own)))
    report = report_of(source=installed, timeline=timeline_of(events), notes=(f"sent by {own}",))
    text = read(forecast_of(outlook_of(report=report))).text
    assert "pytest/__init__.py:1" in text and "sent by jdp/base/formatting.py:2" in text
    assert "site-packages" not in text and str(Path(jdp.__file__).parents[1]) not in text
    assert without_roots(elsewhere) == elsewhere


@pytest.mark.parametrize(
    ("held", "unit", "limit"), [(5 * 2**20, "MiB", "beyond the axis"), (40 * 2**30, "GiB", "dashed")]
)
def test_the_memory_axis_has_the_bytes_unit(held, unit, limit):
    found = read(forecast_of(outlook_of(memory=Memory(parameters=held), headroom=ROOM)))
    assert f" {unit} " in found.text and f"{limit}: the memory for a step, 72.4 GiB" in found.text


def assert_only_text(found):
    """`HOSTILE` is on the page ten times at least, and is no tag of it."""
    assert found.tags.count("script") == 1 and "img" not in found.tags
    assert {"onerror", "onload"}.isdisjoint(name for _, name, _ in found.attributes)
    assert found.text.count('<script>alert("x")</script>') >= 10


def test_hostile_names_stay_text():
    events = (*events_of(50, what=HOSTILE), Event(HOSTILE, COMPUTE, 1.0, 0.5, HOSTILE, HOSTILE))
    report = report_of(
        name=HOSTILE,
        kept=False,
        breaches=(HOSTILE,),
        source=HOSTILE,
        theory=Theory(0, ()),  # no closed form for a strategy of that name
        headroom=Headroom(True, 1, 2, 0.9, HOSTILE),
        timeline=timeline_of(events),
    )
    estimate = outlook_of(HOSTILE, report=report)
    broken = Estimate("ddp", 1, error=HOSTILE)
    forecast = dataclasses.replace(forecast_of(estimate, broken, notes=(HOSTILE,)), target=HOSTILE)
    assert_only_text(read(forecast, title=HOSTILE, described=HOSTILE))


def test_breaches_are_red_with_their_remedy():
    found = read(forecast_of(outlook_of(kept=False, breaches=("too much. Use partitioning='manual'.",))))
    assert "Use partitioning='manual'." in found.text
    assert "breach" in found.values("class") and "bad" in found.values("class")
    whole = read(forecast_of(outlook_of()))
    assert "breach" not in whole.values("class") and "bad" not in whole.values("class")


FAILED = Estimate("zero3", 1, error="RESOURCE_EXHAUSTED: no room")


@pytest.mark.parametrize(
    ("estimates", "expected"),
    [
        ((outlook_of(), FAILED), "did not compile"),
        ((FAILED,), "No candidate compiled."),
        ((outlook_of(timeline=None),), "Step times are unknown"),
        ((outlook_of(headroom=NO_ROOM),), "No candidate fits."),
        ((outlook_of(collectives=0),), "Nothing is sent."),
        ((outlook_of(memory=Memory(), headroom=None),), "What a device holds"),
    ],
)
def test_what_is_not_known_is_said(estimates, expected):
    found = read(forecast_of(*estimates))
    assert expected in found.text
    assert ("RESOURCE_EXHAUSTED: no room" in found.text) == any(o.error is not None for o in estimates)


@pytest.mark.parametrize(("ways", "kernels"), [(1, 50_000), (4, 5_000), (24, 2_000)])
def test_a_long_program_makes_a_small_page(ways, kernels):
    long = "jit(train_step)/" + "transpose(jvp(<model>))/while/body/closed_call/" * 6 + "dot_general"
    events = timeline_of(events_of(kernels, what=long))
    long_line = "/a/rather/long/path/to/the/place/of/the/loss/function.py:1234"
    report = report_of(collectives=2000, source=long_line, timeline=events)
    estimates = [outlook_of(report=report, accumulate=i) for i in range(1, ways + 1)]
    assert len(plan_page(forecast_of(*estimates), title="t").encode()) < 1_500_000
