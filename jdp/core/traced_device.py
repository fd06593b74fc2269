"""The device that code is traced for: what a model may look at to choose among forms of the same computation.

A step knows its mesh, which may be of devices that are only described; a model does not, and JAX's default device can
be another one.
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

from jdp.core.types import Device

_CURRENT: ContextVar[Device | None] = ContextVar("jdp_traced_device", default=None)


@contextmanager
def tracing_for(device: Device) -> Generator[None]:
    """Have `traced_device` return this device while the context lasts, in which a step is traced."""
    token = _CURRENT.set(device)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def traced_device() -> Device:
    """Return a device of the kind that the code being traced will run on: outside of a step, JAX's default."""
    device: Device = _CURRENT.get() or jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return jax.local_devices(backend=device)[0] if device is None or isinstance(device, str) else device
