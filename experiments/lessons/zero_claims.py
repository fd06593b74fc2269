"""Popular claims about ZeRO, each beside the number of `zero_by_hand.py` or of the closed form."""

from narration import show

from jdp.foresight.traffic.theory import sent_bytes, zero_bytes

PHASES = ("forward", "backward", "update")


def claims(sent: dict[str, list[float]]) -> list[tuple[str, float, float]]:
    gb = lambda stage, optimizer: zero_bytes(70 * 10**9, 8, stage, optimizer=optimizer).total / 1e9  # noqa: E731
    return [
        ("70B on 8 devices, ZeRO-2 at 2 + 2 + 8 bytes: GB each", 210, gb("zero2", 8)),
        ("70B with mixed-precision Adam, fp32 master weights too: GB", 840, gb("ddp", 12)),
        ("ZeRO-1 sends, × D", 3, sum(sent["zero1"])),
        ("ZeRO-1 sends before the update, for optimizer states, × D", 2, sum(sent["zero1"][:2])),
        ("ZeRO-3 sends, × DDP", 3, sum(sent["zero3"]) / sum(sent["ddp"])),
        *zip((f"ZeRO-3, {phase}, × D" for phase in PHASES), (2, 2, 1), sent["zero3"], strict=True),
    ]


def sent_by_width() -> list[tuple[str, float, float]]:
    """Return the GB that a device sends per step, for 70B on 8 devices: (stage, both in 16 bits, jdp's bf16)."""
    gb = lambda stage, grads: sent_bytes(70 * 10**9, 8, stage, params=2, grads=grads) / 1e9  # noqa: E731
    return [(stage, gb(stage, 2), gb(stage, 4)) for stage in ("ddp", "zero1", "zero2", "zero3")]


def show_claims(sent: dict[str, list[float]]) -> None:
    """Print both tables with their explanations; `sent`: each stage's units of D in each phase."""
    said = """The claims count arrays that are never sent (moments), count an all-reduce and also its halves, or forget
        to divide a term."""
    show("Popular claims", ("what", "claimed", "right"), claims(sent), said)
    said = """"zero1 sends what ddp sends, zero3 1.5 times as much" holds if gradients and weights have the same width.
        jdp's bf16 sums gradients in 32 bits and gathers weights in 16: zero1 sends less than ddp, zero3 as much."""
    headers = ("stage", "gradients and weights in 16 bits", "gradients in 32, weights in 16")
    show("GB that a device sends per step, 70B on 8 devices", headers, sent_by_width(), said)
