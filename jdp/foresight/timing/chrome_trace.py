"""A timeline as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from typing import Any

from jdp.foresight.timing.timeline import COMMUNICATION, COMPUTE, HOST, Timeline

_LANES = (COMPUTE, COMMUNICATION, HOST)


def chrome_trace(timeline: Timeline, name: str) -> dict[str, Any]:
    """Return Chrome's Trace Event Format: one process called `name`, a thread for each lane; times in microseconds."""
    named = [
        ("process_name", 0, name),
        *(("thread_name", i, lane) for i, lane in enumerate(_LANES) if lane != HOST or timeline.host_seconds),
    ]
    labels = [{"name": kind, "ph": "M", "pid": 0, "tid": i, "args": {"name": text}} for kind, i, text in named]
    events = [
        {
            "name": event.name,
            "cat": event.lane,
            "ph": "X",
            "pid": 0,
            "tid": _LANES.index(event.lane),
            "ts": 1e6 * event.start,
            "dur": 1e6 * event.seconds,
            "args": {"op": event.what, "source": event.source, "bytes": event.bytes, "times": event.times},
        }
        for event in timeline.events
    ]
    return {"traceEvents": [*labels, *events], "displayTimeUnit": "ms"}
