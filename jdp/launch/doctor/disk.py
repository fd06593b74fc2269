"""The disk that holds the runs: is there room, are there inodes, and can it be written."""

import os
import secrets
from pathlib import Path

from jdp.base.formatting import format_bytes
from jdp.launch.doctor.findings import Finding

LITTLE_ROOM = 2**30
FEW_INODES = 10_000  # a checkpoint has some tens of files a process


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest above it that exists, in which it would be made."""
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.exists())


def examine_disk(folder: Path) -> list[Finding]:
    """Return what was found of room, inodes and writing. A file is written and removed again."""
    place = existing(folder)
    return [examine_room(place), _inodes(place), _writing(place)]


def examine_room(place: Path, checkpoint: Path | None = None) -> Finding:
    """Return what was found of the room on a disk."""
    needed = 0 if checkpoint is None else sum(file.stat().st_size for file in checkpoint.rglob("*"))
    status = os.statvfs(place)
    free, size = status.f_frsize * status.f_bavail, status.f_frsize * status.f_blocks
    mend = f"make room (du -xh {place} | sort -h | tail), or choose another --run-dir"
    found = f"{format_bytes(free)} free of {format_bytes(size)} at {place}"
    found += f"; a checkpoint takes {format_bytes(needed)}" if needed else ""
    check = "disk" if checkpoint is None else "next checkpoint"
    return Finding.judged(check, found, mend, wrong=free < (needed or LITTLE_ROOM))


def _inodes(place: Path) -> Finding:
    status = os.statvfs(place)
    if not status.f_files:  # Btrfs and some network file systems have no fixed number
        return Finding("inodes", "ok", f"without a limit at {place}")
    mend = f"remove small files (du --inodes -x {place} | sort -n | tail), or choose another --run-dir"
    found = f"{status.f_favail:,} free of {status.f_files:,} at {place}"
    return Finding.judged("inodes", found, mend, wrong=status.f_favail < FEW_INODES)


def _writing(place: Path) -> Finding:
    if not place.is_dir():
        return Finding("writing", "wrong", f"{place} is a file, not a folder", "choose another --run-dir")
    probe = place / f".jdp-doctor-{secrets.token_hex(8)}"
    try:
        try:
            with probe.open("wb") as file:
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        mend = f"make {place} writable for this user, or choose another --run-dir"
        return Finding("writing", "wrong", f"{place} cannot be written: {error.strerror}", mend)
    return Finding("writing", "ok", f"a file was written and removed at {place}")
