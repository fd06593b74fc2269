"""Fault tolerance while a run goes on: deadlines, what each rank last did, checks of the state's health."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jdp.guard.replicas import CorruptState as CorruptState
    from jdp.guard.replicas import check_replicas as check_replicas


__all__ = ["CorruptState", "check_replicas"]

if not TYPE_CHECKING:  # else each name would be there, misspelt ones too

    def __getattr__(name: str) -> Any:
        """Import what needs JAX when it is first used: what reads a run's files answers without."""
        if name not in __all__:
            raise AttributeError(f"module 'jdp.guard' has no attribute {name!r}")
        from jdp.guard import replicas

        return getattr(replicas, name)
