"""The disk of the runs: its space, its inodes, and whether it is writable."""

import os
import secrets
from pathlib import Path

from jdp.base.disk_cache import default_folder, without_home
from jdp.base.formatting import format_bytes
from jdp.launch.doctor.findings import Finding

LITTLE_ROOM = 2**30
FEW_INODES = 10_000  # a checkpoint has tens of files per process


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.exists())


def examine_disk(folder: Path) -> list[Finding]:
    """Check space, inodes and writing; write and remove a file."""
    folder = existing(folder)
    return [examine_room(folder), _inodes(folder), _writing(folder)]


def examine_cache() -> Finding:
    """Check that the cache of compiled programs and tokens has a folder."""
    folder = default_folder()
    mend = "export JDP_CACHE_DIR=FOLDER, a folder that this user can write"
    found = without_home(folder)
    return Finding.judged("cache", found or str(folder), mend, note=found is not None)


def examine_room(folder: Path, checkpoint: Path | None = None) -> Finding:
    """Check the free space on a disk, also for a checkpoint as large as `checkpoint`."""
    needed = 0 if checkpoint is None else sum(file.stat().st_size for file in checkpoint.rglob("*"))
    status = os.statvfs(folder)
    free, size = status.f_frsize * status.f_bavail, status.f_frsize * status.f_blocks
    mend = f"make room (du -xh {folder} | sort -h | tail), or choose another --run-dir"
    found = f"{format_bytes(free)} free of {format_bytes(size)} at {folder}"
    found += f"; a checkpoint takes {format_bytes(needed)}" if needed else ""
    check = "disk" if checkpoint is None else "next checkpoint"
    return Finding.judged(check, found, mend, wrong=free < (needed or LITTLE_ROOM))


def _inodes(folder: Path) -> Finding:
    status = os.statvfs(folder)
    if not status.f_files:  # Btrfs and some network file systems have no fixed number
        return Finding("inodes", "ok", f"without a limit at {folder}")
    mend = f"remove small files (du --inodes -x {folder} | sort -n | tail), or choose another --run-dir"
    found = f"{status.f_favail:,} free of {status.f_files:,} at {folder}"
    return Finding.judged("inodes", found, mend, wrong=status.f_favail < FEW_INODES)


def _writing(folder: Path) -> Finding:
    if not folder.is_dir():
        return Finding("writing", "wrong", f"{folder} is a file, not a folder", "choose another --run-dir")
    probe = folder / f".jdp-doctor-{secrets.token_hex(8)}"
    try:
        try:
            with probe.open("wb") as file:
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        mend = f"make {folder} writable for this user, or choose another --run-dir"
        return Finding("writing", "wrong", f"{folder} cannot be written: {error.strerror}", mend)
    return Finding("writing", "ok", f"a file was written and removed at {folder}")
