"""ZeRO's memory in closed form: what a device keeps of weights, gradients and optimizer state, whatever the model is.

`zero_bytes` is section 3 and Figure 1 of Rajbhandari et al. 2019 (arXiv:1910.02054): Ψ parameters in mixed precision
with Adam take 2Ψ bytes for 16-bit weights, 2Ψ for 16-bit gradients, and KΨ = 12Ψ for the optimizer (fp32 master
weights, momentum, variance). N devices share the optimizer's part (stage 1), the gradients too (2), and the weights
too (3).

`jdp_bytes` is the same for how jdp keeps them. It differs from the paper in two ways: the fp32 master weights are the
parameters, sharded at rest in every stage and counted as parameters, not as optimizer state; and the 16-bit weights
are a working copy that lives within a step. Gradients are summed in fp32 by default, so they take 4Ψ where the paper
has 2Ψ.

Two numbers that popular tables get wrong. ZeRO-2 for 70B parameters on 8 devices, with 2 + 2 + 8 bytes, keeps
140 + (140 + 560) / 8 = 227.5 GB; often printed is 210, which forgets the gradients' eighth. ZeRO-3 sends 3Ψ elements a
step where DDP sends 2Ψ (section 7): 1.5 times as much; often printed is 3 times.

All of this is model state only: activations, temporaries and the batch come on top (`foresight.memory` has them).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jdp.core.sharding.strategy import STRATEGIES, strategy


@dataclass(frozen=True)
class ZeroRow:
    """Bytes on a device, rounded up. `working` is jdp's working copy; the paper has none."""

    parameters: int
    gradients: int
    optimizer: int
    working: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.working


def zero_bytes(
    parameters: int, devices: int, name: str, *, params: int = 2, grads: int = 2, optimizer: int = 12
) -> ZeroRow:
    """Model state on each device, as the paper counts it.

    Args:
        parameters: Ψ, how many the model has.
        devices: N, how many share the state: the size of the `data` axis.
        name: "ddp" (the paper's baseline), "zero1" (P_os), "zero2" (P_os+g), "zero3" (P_os+g+p).
        params, grads, optimizer: bytes a parameter: 2 + 2 + 12 is mixed-precision Adam, K = 12.

    Raises:
        ValueError: unknown strategy; parameters or devices not positive.
    """
    _check(parameters, devices)
    stage = list(STRATEGIES).index(strategy(name).name)

    def part(size: int, shared_from: int) -> int:
        return -(-size * parameters // (devices if stage >= shared_from else 1))

    return ZeroRow(part(params, 3), part(grads, 2), part(optimizer, 1))


def jdp_bytes(
    parameters: int,
    devices: int,
    name: str,
    *,
    master: int = 4,
    compute: int = 2,
    reduce: int = 4,
    optimizer: int = 8,
    layer: int = 0,
) -> ZeroRow:
    """Model state on each device, as jdp keeps it: what rests there, the gradient accumulator, the working copy.

    Args:
        parameters, devices, name: as for `zero_bytes`.
        master, compute, reduce: bytes an element of `Precision.params`, `.compute` and `.reduce`.
        optimizer: bytes a parameter of optimizer state: 8 for Adam's two moments in fp32.
        layer: parameters of the largest layer: what zero3 gathers at a time. 0 leaves its working copy out.

    Raises:
        ValueError: as for `zero_bytes`.
    """
    _check(parameters, devices)
    row = strategy(name)
    at_rest = devices if row.shard_state else 1
    summed = devices if row.reduce_each_microbatch else 1
    # Nothing is copied where whole weights rest in the dtype they are used in.
    copied = layer if row.gather == "use" else 0 if row.gather == "never" and compute == master else parameters
    return ZeroRow(
        -(-master * parameters // at_rest),
        -(-reduce * parameters // summed),
        -(-optimizer * parameters // at_rest),
        compute * copied,
    )


def sent_elements(parameters: int, name: str) -> int:
    """Elements a device sends a step, for many devices: 2Ψ, and 3Ψ under zero3 (section 7 of the paper)."""
    return (3 if strategy(name).gather == "use" else 2) * parameters


def zero_table(
    parameters: int,
    devices: int,
    *,
    params: int = 2,
    grads: int = 2,
    optimizer: int = 12,
    strategies: Sequence[str] = tuple(STRATEGIES),
) -> str:
    """The closed form as text: a line a strategy, in GB of 10^9 bytes as in the paper; then how jdp keeps it (bf16)."""
    paper = {
        name: zero_bytes(parameters, devices, name, params=params, grads=grads, optimizer=optimizer)
        for name in strategies
    }
    own = {name: jdp_bytes(parameters, devices, name) for name in strategies}
    accounting = f"{params} + {grads} + {optimizer} bytes a parameter"
    lines = [
        f"Model state on each of {devices} devices, {parameters / 1e9:.4g}B parameters, GB (10^9 bytes)",
        f"{'':8}{f'Rajbhandari et al. 2019, {accounting}':^44}{'as jdp keeps it, bf16':^48}{'sent, ×':>9}",
        f"{'':8}"
        + "".join(f"{head:>11}" for head in ("parameters", "gradients", "optimizer", "total"))
        + "".join(f"{head:>12}" for head in ("parameters", "gradients", "optimizer", "total"))
        + f"{'of ddp':>9}",
    ]
    for name in strategies:
        cells = "".join(f"{_gb(size):>11}" for size in _cells(paper[name]))
        cells += "".join(f"{_gb(size):>12}" for size in _cells(own[name]))
        times = sent_elements(parameters, name) / sent_elements(parameters, "ddp")
        lines.append(f"{name:8}{cells}{times:>9.3g}")
    return "\n".join([*lines, *_NOTES])


_NOTES = (
    "jdp counts the fp32 master weights as parameters (the paper: as optimizer state), shards them at rest in every",
    "stage, and keeps gradients in fp32; its total has the working copy in it, but for zero3, which gathers by layer.",
    "Beware of popular tables: ZeRO-2 for 70B on 8 devices at 2 + 2 + 8 bytes is 227.5 GB (often printed: 210), and",
    "ZeRO-3 sends 1.5 times what DDP sends (often printed: 3 times).",
)


def _cells(row: ZeroRow) -> tuple[int, int, int, int]:
    return row.parameters, row.gradients, row.optimizer, row.total


def _gb(size: int) -> str:
    return f"{size / 1e9:.4g}" if size < 1e13 else f"{size / 1e9:,.0f}"


def _check(parameters: int, devices: int) -> None:
    if parameters < 1 or devices < 1:
        raise ValueError(f"ZeRO's table needs at least one parameter and one device; got {parameters} on {devices}.")
