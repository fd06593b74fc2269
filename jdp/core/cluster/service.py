"""The cluster that this process has joined, and the service through which its processes communicate."""

from typing import Any

import jax
from jax._src.distributed import global_state  # nothing public says who we are without starting a backend

THREAD_SECONDS = 5.0
"""How long to wait for a thread to end, which may be calling a service that is gone."""


class LostPeer(RuntimeError):
    """A process did not come to a barrier, or did not send what the others wait for; the message names it."""


def joined_as() -> tuple[int, int] | None:
    """Return (process id, number of processes) in the cluster that this process has joined, else None.

    Unlike `jax.process_index()` it starts no backend, and so never waits for a peer.
    """
    return (global_state.process_id, global_state.num_processes) if jax.distributed.is_initialized() else None


def coordination_client() -> Any:
    """Return the client of JAX's coordination service: barriers and a key-value store; None outside of a cluster."""
    return global_state.client
