"""Damage to disks, files and memory, as crashes, people and defects make it."""

import resource
import shutil
import subprocess
from contextlib import contextmanager

import jax
import numpy as np
import pytest

from jdp.checkpoint import stored


@contextmanager
def files_of_at_most(size):
    """The system refuses to let any file grow beyond `size` bytes, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def small_disk(folder, size="900k", inodes=0):
    """A file system of its own; remounts read-only on demand. Only root may."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes={inodes}", "tmpfs", folder]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this process may not mount a file system")
    try:
        yield lambda mode: subprocess.run(["mount", "-o", f"remount,{mode}", folder], check=True)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def flip(file, position, bit=0):
    """Flip one bit of the byte at `position`."""
    with file.open("r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ (1 << bit)]))


def zero_page(file, position, size=4096):
    """Write zeros over the page that `position` is in."""
    start = position // size * size
    with file.open("r+b") as stream:
        stream.seek(start)
        stream.write(bytes(min(size, file.stat().st_size - start)))


def cut(file):
    """Lose the second half."""
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)


def vouch(step):
    """Write a checkpoint's checksums anew, so that what was changed in it is taken for what was saved."""
    stored.commit(step, stored.hash_share(step, 0, 1))


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
