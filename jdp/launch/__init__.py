"""Start processes: `local` starts several on this machine."""

from jdp.launch.local import launch

__all__ = ["launch"]
