"""A step's report with a verdict on XLA:CPU's program, which `jdp.verify` does not judge: any machine can run it."""

import inspect

from jdp.base.disk_cache import Cache
from jdp.foresight.targets.relocate import abstract_on
from jdp.foresight.targets.resolve import target_of
from jdp.foresight.verify import report


def judged(step, state, batch, target=None, *, cache=True):
    candidate = abstract_on(step, state, batch, target)
    devices = target_of(target, candidate.state)
    compiled = candidate.compile(devices, Cache.usual(cache))
    return report(candidate.step, candidate.state, compiled, str(devices), notes=candidate.notes)


def source_line(function, text):
    """The place of the line of `function` that contains `text`, as reports name it."""
    lines, first = inspect.getsourcelines(function)
    return f"{inspect.getsourcefile(function)}:{first + next(i for i, line in enumerate(lines) if text in line)}"
