"""ZeRO's memory in closed form: bytes of weights, gradients and optimizer state on a device, for any model.

Section 3 and Figure 1 of Rajbhandari et al. 2019 (arXiv:1910.02054) count Ψ parameters in mixed precision with Adam.
They take 2Ψ bytes for 16-bit weights, 2Ψ for 16-bit gradients, and 12Ψ for the optimizer (fp32 weights, momentum,
variance). N devices share the optimizer's part (stage 1), also the gradients (2), and also the weights (3). jdp stores
it differently (`jdp_bytes`). The fp32 master weights are the parameters, sharded at rest in every stage. The 16-bit
weights are a working copy within a step, and gradients are summed in fp32 by default. `memory.py` adds activations.
"""

from dataclasses import dataclass

from jdp.base.errors import UserError
from jdp.core.sharding.strategy import STRATEGIES, strategy


@dataclass(frozen=True)
class ZeroRow:
    """Bytes on a device, rounded up."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class JdpRow:
    """Bytes on a device under jdp, rounded up."""

    master: int  # at rest: fp32 master weights
    moments: int  # at rest: Adam's two moments in fp32
    gradients: int  # within a step: in the dtype of their sums
    working: int  # within a step: the working copy; 0 under zero3, which gathers layer by layer

    @property
    def at_rest(self) -> int:
        return self.master + self.moments

    @property
    def total(self) -> int:
        return self.at_rest + self.gradients + self.working


def zero_bytes(
    parameters: int, devices: int, name: str, *, params: int = 2, grads: int = 2, optimizer: int = 12
) -> ZeroRow:
    stage = list(STRATEGIES).index(strategy(name).name)
    sizes = ((params, 3), (grads, 2), (optimizer, 1))  # bytes a parameter, and the first stage that shares them
    return ZeroRow(*(_share(size, parameters, devices, stage >= first) for size, first in sizes))


def jdp_bytes(parameters: int, devices: int, name: str, *, working: int = 2, grads: int = 4) -> JdpRow:
    """Return the bytes of model state on each device under jdp, with Adam and more than one microbatch."""
    row = strategy(name)
    return JdpRow(
        _share(4, parameters, devices, row.shard_state),
        _share(8, parameters, devices, row.shard_state),
        _share(grads, parameters, devices, row.reduce_each_microbatch),
        0 if row.gather == "use" else _share(working, parameters, devices, False),
    )


def sent_bytes(
    parameters: int, devices: int, name: str, *, params: int = 2, grads: int = 2, accumulate: int = 1
) -> int:
    """Return the bytes that each device sends a step by the ring algorithms, rounded up (section 7 of the paper)."""
    row = strategy(name)
    reductions = 2 if not row.shard_state else accumulate if row.reduce_each_microbatch else 1
    gathers = {"never": 0, "step": 1, "use": 2 * accumulate}[row.gather]
    return _share((devices - 1) * (reductions * grads + gathers * params), parameters, devices, True)


def _share(size: int, parameters: int, devices: int, shared: bool) -> int:
    if parameters < 1 or devices < 1:
        raise UserError(
            f"ZeRO's formula needs at least one parameter and one device; given {parameters} on {devices}. Give "
            "1 or more."
        )
    return -(-size * parameters // (devices if shared else 1))
