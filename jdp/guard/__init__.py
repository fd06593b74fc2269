"""Fault tolerance of a run: deadlines, a diagnosis from all logs of events, checks of the state."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jdp.guard.replicas import CorruptState as CorruptState
    from jdp.guard.replicas import check_replicas as check_replicas


__all__ = ["CorruptState", "check_replicas"]

if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> Any:
        """Import modules that need JAX at first use, because readers of a run's files do not need JAX."""
        if name not in __all__:
            raise AttributeError(f"module 'jdp.guard' has no attribute {name!r}")
        from jdp.guard import replicas

        return getattr(replicas, name)
