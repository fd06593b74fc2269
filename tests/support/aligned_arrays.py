"""Arrays of NumPy that JAX does not copy on the CPU."""

import numpy as np


def aligned(shape, dtype=np.float32):
    """Memory that JAX takes for its own on the CPU: it begins at a multiple of 64 bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)
