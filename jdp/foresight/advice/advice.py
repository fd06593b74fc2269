"""Which candidate to take, in words: what fits, what is fastest, why, and what to change."""

from __future__ import annotations

from collections.abc import Sequence

from jdp.base.formatting import format_bytes, format_percent, format_seconds
from jdp.foresight.forecast import Estimate, Settings
from jdp.foresight.memory.peak import RESERVED_BYTES
from jdp.foresight.timing.parts import ATTENTION, COPIES, ELEMENTWISE, LOSS, OPTIMIZER, Part

CLOSE = 0.01
"""Step times within 1 % are taken for equal: the model of time is coarser than that. Less memory then decides."""
SHORT_MATMUL_SECONDS = 50e-6
"""Matrix products this short are no longer far above the launch of a kernel (a few µs), nor fill a large chip."""
FEW_PRODUCTS = 0.4
"""Where matrix products are less of the computing time than this, faster ones would not help much."""
EXPOSED = 0.05
"""Waiting for more than this share of a step is worth a word."""
COSTLY = 0.1
"""A part of a step that takes more than this share of it is worth a change."""
LITTLE, MOST_PARTS = 0.01, 4
"""What is less than this share of the computing time is left out; at most so many parts are named."""


_ON_HOST = 'keep the optimizer state on the host (offload = "optimizer"), '


def advise(estimates: Sequence[Estimate]) -> tuple[Estimate | None, tuple[str, ...]]:
    """Return the fastest estimate that fits, or None if none fits, and the reasons as sentences."""
    compiled = [o for o in estimates if o.memory is not None]
    fitting = [o for o in compiled if o.fits is not False]
    sentences = [_what_fits(compiled)] if compiled else ["No candidate compiled."]
    reports = [o.report for o in compiled if o.report is not None]
    sentences += [report.like_zero2 for report in reports if report.like_zero2][:1]  # once, whatever is chosen
    if not fitting:
        return None, (*sentences, *_nothing_fits(compiled))
    choice = _fastest(fitting)
    sentences += _why_fastest(choice, fitting)
    if choice.axes is not None:
        flags = " ".join(f"--mesh.{axis} {size}" for axis, size in choice.axes.items())
        sentences.append(f"Its mesh is not the experiment's own: {flags}.")
    if choice.headroom is not None and choice.headroom.fraction is not None:
        sentences.append(f"{choice.name} {choice.headroom.words}.")
    sentences += [*_computing(choice), *_communication(choice), *_host(choice), *_to_change(choice)]
    return choice, tuple(sentences)


def _fastest(fitting: Sequence[Estimate]) -> Estimate:
    """Return the fastest; of those within `CLOSE` of it, one that keeps its contract, then the one that holds least."""
    timed = [o for o in fitting if o.step_seconds is not None]
    least = min((o.step_seconds or 0.0 for o in timed), default=0.0)
    close = [o for o in timed if (o.step_seconds or 0.0) <= (1 + CLOSE) * least]
    breaks = [o for o in fitting if o.report is not None and not o.report.kept]
    return min(close or fitting, key=lambda o: (o in breaks, o.bytes_per_device or 0))


def _what_fits(compiled: Sequence[Estimate]) -> str:
    available = compiled[0].available_bytes
    needs = ", ".join(f"{o.name} {format_bytes(o.bytes_per_device or 0)}" for o in compiled)
    if available is None:
        return f"A device holds: {needs}. What it has is not known here."
    kept = [o.name for o in compiled if o.fits]
    verdict = "all fit" if len(kept) == len(compiled) else f"{', '.join(kept)} fit" if kept else "none fits"
    beside = f"beside {format_bytes(RESERVED_BYTES)} for CUDA and NCCL"
    return f"Of {format_bytes(available)} that a device has for it ({beside}), they need: {needs}; {verdict}."


def _nothing_fits(compiled: Sequence[Estimate]) -> list[str]:
    if not compiled:
        return []
    least = min(compiled, key=lambda o: o.bytes_per_device or 0)
    memory = least.memory
    assert memory is not None
    rest = memory.parameters + memory.optimizer + memory.gradients + memory.working
    fixed, available = memory.total - rest, least.available_bytes or 0
    if fixed >= available or fixed > rest:
        return [
            f"{least.name} needs least; {format_bytes(fixed)} of it are activations, batch and temporaries: "
            f"{_for_activations(least.settings)}."
        ]
    if least.strategy != "zero3" and least.devices > 1:
        return [
            f"{least.name} needs least; weights and optimizer state are {format_bytes(rest)} of it: zero3 shards them "
            "most."
        ]
    more, set_to = -(-rest // (available - fixed)), least.settings
    return [
        f"{least.name} needs least; weights and optimizer state are {format_bytes(rest)} of it: take more devices "
        f"(about {more} times as many, with as many rows each), {'' if memory.host else _ON_HOST}"
        f"{'or a lower precision' if set_to.precision in (None, 'fp32') else 'or a smaller model'}."
    ]


def _for_activations(given: Settings) -> str:
    """Return what makes activations smaller and is not done yet, in words."""
    ways = list[str]()
    if given.rows != 1:
        ways.append("raise accumulate")
    if given.remat in _REMATERIALISE_MORE:
        ways.append(_REMATERIALISE_MORE[given.remat])
    ways.append("give a device fewer rows" if given.rows != 1 else "shorten the rows or take devices with more memory")
    return f"{', '.join(ways[:-1])}, or {ways[-1]}" if len(ways) > 1 else ways[0]


_REMATERIALISE_MORE = {
    None: "rematerialise (remat)",
    "none": "rematerialise (remat)",
    "dots": 'rematerialise the MLP (remat = "dots_except_mlp") or all (remat = "full")',
    "dots_except_mlp": 'rematerialise all (remat = "full")',
}
_KEEPING_MORE = {
    None: '"dots_except_mlp", "dots" or "none"',
    "full": '"dots_except_mlp", "dots" or "none"',
    "dots_except_mlp": '"dots" or "none"',
    "dots": '"none"',
}


def _why_fastest(choice: Estimate, fitting: Sequence[Estimate]) -> list[str]:
    """Say what the choice takes, which take as long, which is the next slower, and where the time goes."""
    if choice.step_seconds is None:
        return [f"{choice.name} holds least; how long a step takes is not known for this target."]
    verdict = f"{choice.name} is the one to take: a step takes {format_seconds(choice.step_seconds)}"
    gains = [(o, (o.step_seconds or 0.0) / choice.step_seconds - 1) for o in fitting if o is not choice]
    slower = min(((gain, i) for i, (_, gain) in enumerate(gains) if gain >= CLOSE), default=None)
    clauses = [verdict, *(f"{o.name} takes as long{_more(choice, o)}" for o, gain in gains if gain < CLOSE)]
    if slower is not None:
        gain, index = slower
        other = gains[index][0]
        clauses.append(f"{other.name} takes {format_percent(gain)} longer{_reason(choice, other)}")
    return [f"{'; '.join(clauses)}."]


def _more(choice: Estimate, other: Estimate) -> str:
    """Return how much more memory an equally fast candidate takes, in words."""
    more = (other.bytes_per_device or 0) - (choice.bytes_per_device or 0)
    if not more:
        return " in as much memory"
    return f" and holds {format_bytes(abs(more))} {'more' if more > 0 else 'less'}"


def _reason(choice: Estimate, other: Estimate) -> str:
    """Where the other one's time goes: waiting, or computing."""
    if choice.timeline is None or other.timeline is None:
        return ""
    waits = other.timeline.exposed_seconds - choice.timeline.exposed_seconds
    computes = other.timeline.compute_seconds - choice.timeline.compute_seconds
    if waits >= computes:
        return f": it waits {format_seconds(waits)} longer for other devices"
    return f": it computes {format_seconds(computes)} longer"


def _communication(choice: Estimate) -> list[str]:
    timeline = choice.timeline
    if timeline is None or choice.report is None:
        return []
    if not timeline.communication_seconds:
        return ["Nothing is sent."]
    sent, seconds = format_bytes(choice.report.wire_bytes_per_device), format_seconds(timeline.communication_seconds)
    hidden = format_percent(1 - timeline.exposed_fraction)
    sentences = [f"It sends {sent} a device in {seconds}; {hidden} of that time is hidden behind computation."]
    if not choice.report.kept:
        sentences.append("It breaks its strategy's contract: `jdp verify` names collective, parameter and remedy.")
    return sentences


def _host(choice: Estimate) -> list[str]:
    """Say what rests in host memory, and how long its copies take."""
    timeline, memory = choice.timeline, choice.memory
    if memory is None or not memory.host:
        return []
    held = f"{format_bytes(memory.host)} for a device rest in its host's memory"
    if timeline is None or not timeline.host_seconds:
        return [f"{held}; how long copies take is not known for this target."]
    busy, waits = format_seconds(timeline.host_seconds), format_seconds(timeline.host_wait_seconds)
    return [f"{held}; copies from and to it take {busy} a step, of which computing waits {waits}."]


def _computing(choice: Estimate) -> list[str]:
    """Say what the computing time is spent on, and how much of it is computed again."""
    timeline = choice.timeline
    if timeline is None or not timeline.parts:
        return []
    whole = timeline.compute_seconds or 1.0
    shares = [
        f"{format_percent(part.seconds / whole)} in {_named(name, part)}"
        for name, part in timeline.parts.items()
        if part.seconds > LITTLE * whole
    ]
    sentence = f"It computes {format_seconds(timeline.compute_seconds)}: {', '.join(shares[:MOST_PARTS])}"
    again = timeline.recomputed_seconds / whole
    more = f"; {format_percent(again)} of that is computed again, for rematerialisation" if again > LITTLE else ""
    return [f"{sentence}{more}."]


def _named(name: str, part: Part) -> str:
    if name == ELEMENTWISE and part.lines:
        line = max(part.lines, key=part.lines.__getitem__)
        return f"element-wise work (most at {line.rpartition('/')[2]})"
    named = {
        ATTENTION: "unfused attention" if _is_unfused(part) else "attention",
        LOSS: "the loss",
        OPTIMIZER: "the update",
    }
    return named.get(name, name)


def _is_unfused(part: Part) -> bool:
    return part.unfused > part.seconds / 2


def _to_change(choice: Estimate) -> list[str]:
    timeline, sentences = choice.timeline, list[str]()
    if timeline is None or not timeline.step_seconds or not timeline.compute_seconds:
        return sentences
    waiting = timeline.exposed_seconds / timeline.step_seconds
    products = timeline.matmul_seconds / timeline.compute_seconds
    if 0 < products < FEW_PRODUCTS:
        sentences.append(
            f"Matrix products are {format_percent(products)} of its computing time; the rest reads and writes memory."
        )
    elif 0 < timeline.median_matmul_seconds < SHORT_MATMUL_SECONDS:
        sentences.append(
            "The batch per device is too small: half of the time in matrix products goes to ones that run for "
            f"{format_seconds(timeline.median_matmul_seconds)} or less."
        )
    costly = (name for name, part in timeline.parts.items() if part.seconds > COSTLY * timeline.step_seconds)
    sentences += [hint for name in costly if (hint := _hint(name, timeline.parts[name], choice))]
    again = timeline.recomputed_seconds
    less = _KEEPING_MORE.get(choice.settings.remat)
    if again > COSTLY * timeline.step_seconds and choice.headroom is not None and less is not None:
        left = choice.headroom.available - choice.headroom.needed
        sentences.append(
            f"A device has {format_bytes(left)} left: rematerialising less (remat = {less}), as far as that holds, "
            f"saves up to {format_seconds(again)}."
        )
    if waiting > EXPOSED:
        sentences.append(f"A device waits for others in {format_percent(waiting)} of a step: {_to_wait_less(choice)}.")
    return sentences


def _to_wait_less(choice: Estimate) -> str:
    """Return what hides more communication and is not set yet."""
    finds = "" if choice.settings.max_batch else " (--max-batch finds how many fit)"
    rows = f"more rows a device{finds} give it more to compute for the same bytes"
    if choice.accumulate > 1:
        rows = f"fewer microbatches (train.accumulate) or {rows}"
    overlap = (
        ', and compiler = "overlap" may hide more of them' if choice.settings.compiler in (None, "default") else ""
    )
    return f"{rows}{overlap}"


def _hint(name: str, part: Part, choice: Estimate) -> str | None:
    """Return what to change about a part that costs much; None where that is the model's own work."""
    given = choice.settings
    if name == ATTENTION and _is_unfused(part):
        if given.attention in ("auto", "cudnn") and given.precision == "fp32":
            return 'Attention is not fused, as fused kernels take 16-bit floats: precision = "bf16" has them.'
        if given.attention in ("auto", "cudnn"):
            scanned = ", or for scanned layers of which some have a window (scan = false)"
            return (
                "Attention is not fused: cuDNN has no kernel for these shapes, packed rows or devices"
                f"{scanned if given.scan is not False else ''}."
            )
        return (
            "Unfused attention writes and reads arrays of [length, length]: fused attention does not "
            '(model.attention, or jax.nn.dot_product_attention(..., implementation="cudnn")).'
        )
    if name == OPTIMIZER and choice.strategy == "ddp" and choice.devices > 1:
        return "Every device updates the whole state: zero1 shards the update."
    if name == COPIES:
        return _for_copies(given)
    return _HINTS.get(name)


def _for_copies(given: Settings) -> str | None:
    """Return what makes copies fewer and is not set yet; None where all is."""
    looped = given.scan not in (False, "auto")
    ways = ['layers that are compiled one by one (scan = "auto") have fewer'] if looped else []
    if given.remat in (None, "none"):
        ways.append("rematerialisation has fewer")
    if not ways:
        return None
    return f"Copies are of stacked layers and of what the backward pass needs of them: {', and '.join(ways)}."


_HINTS = {
    LOSS: "The loss reads and writes the logits several times: for a part of the rows at a time they would be small.",
    OPTIMIZER: "The update costs the same for any batch: more rows a device make it a smaller part.",
}
"""Part of a step -> what makes it cheaper."""
