"""Flip one bit of the copy that one device holds, as a defect of its memory would."""

import jax
import numpy as np


def flipped(leaf, device, *, word=0, bit=0):
    """`leaf`, of which `device` (a jax.Device) holds a copy with one bit flipped; other devices' copies stay."""
    shards = []
    for shard in leaf.addressable_shards:
        data = shard.data
        if shard.device == device:
            raw = np.array(data)
            raw.reshape(-1).view(f"uint{8 * raw.dtype.itemsize}")[word] ^= 1 << bit
            data = jax.device_put(raw, device)
        shards.append(data)
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
