"""Fault tolerance of a run: deadlines, a diagnosis from all logs of events, checks of the state."""

from jdp.guard.replicas import CorruptState, check_replicas

__all__ = ["CorruptState", "check_replicas"]
