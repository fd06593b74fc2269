"""ZeRO's memory in closed form: what a device keeps of weights, gradients and optimizer state, whatever the model is.

Section 3 and Figure 1 of Rajbhandari et al. 2019 (arXiv:1910.02054): Ψ parameters in mixed precision with Adam take 2Ψ
bytes for 16-bit weights, 2Ψ for 16-bit gradients, and KΨ = 12Ψ for the optimizer (fp32 master weights, momentum,
variance). N devices share the optimizer's part (stage 1), the gradients too (2), and the weights too (3).

jdp keeps it in another way: the fp32 master weights are the parameters, sharded at rest in every stage, the 16-bit
weights are a working copy that lives within a step, and gradients are summed in fp32 by default.

Popular tables often print 210 GB for ZeRO-2 with 70B parameters on 8 devices at 2 + 2 + 8 bytes; it is 140 + (140 +
560) / 8 = 227.5 GB: 210 leaves out the gradients' eighth.

This is model state only: activations, temporaries and the batch come on top (`peak.memory` has them).
"""

from dataclasses import dataclass

from jdp.core.sharding.strategy import STRATEGIES, strategy


@dataclass(frozen=True)
class ZeroRow:
    """Bytes on a device, rounded up."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of all model state."""
        return self.parameters + self.gradients + self.optimizer


def zero_bytes(
    parameters: int, devices: int, name: str, *, params: int = 2, grads: int = 2, optimizer: int = 12
) -> ZeroRow:
    """Return the bytes of model state on each device, as the paper counts them.

    Args:
        parameters: Ψ, how many the model has.
        devices: N, how many share the state: the size of the `data` axis.
        name: "ddp" (the paper's baseline), "zero1" (P_os), "zero2" (P_os+g), "zero3" (P_os+g+p).
        params, grads, optimizer: bytes a parameter: 2 + 2 + 12 is mixed-precision Adam, K = 12.

    Raises:
        ValueError: unknown strategy; parameters or devices not positive.
    """
    if parameters < 1 or devices < 1:
        raise ValueError(
            f"ZeRO's formula needs at least one parameter and one device; given {parameters} on {devices}. Give "
            "1 or more."
        )
    stage = list(STRATEGIES).index(strategy(name).name)

    def per_device(size: int, shared_from: int) -> int:
        return -(-size * parameters // (devices if stage >= shared_from else 1))

    return ZeroRow(per_device(params, 3), per_device(grads, 2), per_device(optimizer, 1))
