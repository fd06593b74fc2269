"""What a host's memory holds: copies of the state for a restart, a save that is being written, what is offloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jdp.base.formatting import format_bytes


@dataclass(frozen=True)
class HostMemory:
    """Bytes in the memory of the fullest host.

    Attributes:
        copies: of `keep_in_memory`, two generations, with the neighbour's parts.
        staging: of a save, until it is in storage.
        offloaded: of the devices' arrays.
        available: of the host; None where it is not known.
        devices: of the host.
    """

    copies: int
    staging: int
    offloaded: int
    available: int | None
    devices: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.copies + self.staging + self.offloaded

    @property
    def fits(self) -> bool:
        """False where a host is known to have less."""
        return self.available is None or self.total <= self.available

    @property
    def words(self) -> str:
        """What a host holds, in a sentence."""
        parts = {"copies of the state": self.copies, "a save that is written": self.staging}
        parts |= {"offloaded arrays": self.offloaded} if self.offloaded else {}
        listed = " + ".join(f"{format_bytes(size)} of {name}" for name, size in parts.items())
        has = f" of {format_bytes(self.available)}" if self.available is not None else " (--host-memory compares it)"
        return f"a host's memory holds {listed} = {format_bytes(self.total)}{has}{'' if self.fits else ': too little'}"

    def to_json(self) -> dict[str, Any]:
        """Return it as `jdp plan --json` prints it, in bytes."""
        return {
            "copies": self.copies,
            "staging": self.staging,
            "offloaded": self.offloaded,
            "available": self.available,
            "fits": self.fits,
        }
