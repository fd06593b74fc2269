"""A disk that is full, for the tests of what writes to one."""

import resource
import shutil
import subprocess
from contextlib import contextmanager

import pytest


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
    if (
        shutil.which("mount") is None
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes={inodes}", "tmpfs", folder], capture_output=True
        ).returncode
    ):
        pytest.skip("this process may not mount a file system")
    try:
        yield lambda mode: subprocess.run(["mount", "-o", f"remount,{mode}", folder], check=True)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
