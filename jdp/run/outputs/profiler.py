"""A trace of some of a run's steps, for TensorBoard's profiler (XProf) and Perfetto: `jdp train FILE --profile 10:13`.

Only process 0 traces, because all devices do the same. Tracing starts when all work before the first step is done and
stops when the last step's state is ready, so the trace has only these steps. `with` around the loop also stops it if
the run ends earlier, by a signal or an error.
"""

import contextlib
import re
from pathlib import Path
from typing import Any, Self

import jax

from jdp.base.errors import UserError
from jdp.base.formatting import format_bytes
from jdp.base.toml import cut
from jdp.run.outputs.terminal import Display

FOLDER = "profile"


def profiled_steps(text: str | None, of: int) -> range | None:
    """Parse `--profile`."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d{1,18})\s*(?::\s*(\d{1,18})\s*)?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= of:
        rule = f"--profile takes FIRST:LAST, or one step, from 1 to train.steps = {of}"
        raise UserError(f"{rule}; given {cut(repr(text))}: write it like 10:13")
    return range(first, last + 1)


class Profile:
    """Traces `steps` of a visit into RUN/profile; the loop calls `begin` before and `end` after every step."""

    def __init__(self, steps: range | None, folder: Path, display: Display, *, done: int = 0) -> None:
        self._folder, self._say = folder / FOLDER, display.say
        self._left = range(0) if steps is None else range(max(steps[0], done + 1), steps[-1] + 1)
        self._traced: list[int] = []
        self._running = False
        self._annotation = contextlib.ExitStack()
        if steps is not None and not self._left:
            display.say(f"nothing to profile: step {steps[-1]} is done, this visit starts after step {done}")
        if jax.process_index() != 0:
            self._left = range(0)

    def begin(self, step: int, state: Any) -> bool:
        """Call before `step` is queued. Returns True if tracing starts, after waiting for the earlier steps."""
        starts = step in self._left and not self._running
        if starts:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._folder)
            self._running = True
        if self._running:
            self._annotation.enter_context(jax.profiler.StepTraceAnnotation("train", step_num=step))
        return starts

    def end(self, step: int, state: Any) -> bool:
        """Call after `step` is queued. Returns True if tracing ended, after waiting for the step."""
        if not self._running:
            return False
        self._annotation.close()
        self._traced.append(step)
        if step != self._left[-1]:
            return False
        jax.block_until_ready(state)
        self._stop()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._running:
            self._annotation.close()
            self._stop()

    def _stop(self) -> None:
        self._running, self._left = False, range(0)
        jax.profiler.stop_trace()
        files = sorted(self._folder.glob("plugins/profile/*/*"), key=lambda file: file.stat().st_mtime)
        newest = [file for file in files if file.parent == files[-1].parent]
        traces = [file for file in newest if file.name.endswith(".trace.json.gz")]
        opened = f": open {traces[0]} at https://ui.perfetto.dev, or" if traces else ":"
        steps = f"steps {self._traced[0]} to {self._traced[-1]}" if self._traced else "the step that failed"
        self._say(
            f"profiled {steps}, {format_bytes(sum(file.stat().st_size for file in newest))}{opened} "
            f"`pip install xprof && xprof --logdir {self._folder}`"
        )
