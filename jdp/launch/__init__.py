"""Processes: several started on this machine."""

from jdp.launch.local import launch

__all__ = ["launch"]
