"""This machine without JAX: versions by pip's records, and the disk of the runs, its space, inodes and writing."""

import importlib.metadata
import os
import platform
import re
import secrets
from pathlib import Path

from packaging.requirements import Requirement

from jdp.base.disk_cache import default_folder, without_home
from jdp.base.formatting import format_bytes
from jdp.launch.doctor.findings import Finding

SHOWN = ("jdp", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
_PLUGIN = re.compile(r"jax-(cuda|rocm)\d+-(plugin|pjrt)")
_DRIVER = Path("/proc/driver/nvidia/version")
_OLDEST_DRIVER = {"13": 580, "12": 525}
"""CUDA's major version -> its oldest driver (NVIDIA, "CUDA Compatibility", minor versions)."""


def versions() -> dict[str, str]:
    """Return the version of Python and of each package that determines a step; "" if not installed."""
    found = {"python": platform.python_version()} | {name: _version(name) for name in SHOWN}
    installed = {each.name for each in importlib.metadata.distributions()}  # parses a file per name
    return found | {name: _version(name) for name in sorted(filter(None, installed)) if _PLUGIN.fullmatch(name)}


def examine_versions() -> list[Finding]:
    """Check the bounds that jdp and jax declare, the plugins' versions, and the driver's."""
    found = versions()
    shown = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    wrong = [*_unmet("jdp"), *_unmet("jax", only="jaxlib"), *_mismatched(found), *_old_driver(found)]
    return wrong or [Finding("versions", "ok", shown)]


def _unmet(package: str, only: str | None = None) -> list[Finding]:
    try:
        requires = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        text = f"{package} was not installed by pip, so its bounds are unknown"
        return [Finding("versions", "note", text, "pip install . (in jdp's folder)" if package == "jdp" else "")]
    unmet: list[Finding] = []
    for requirement in map(Requirement, requires):
        name, version = requirement.name, _version(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not applies or only not in (None, name):
            continue
        if not version:
            found = f"{package} needs {name}{requirement.specifier}, which is not installed"
        elif not requirement.specifier.contains(version, prereleases=True):
            found = f"{package} was tested with {name}{requirement.specifier}; installed is {version}"
        else:
            continue
        unmet.append(Finding("versions", "wrong", found, f"pip install '{name}{requirement.specifier}'"))
    return unmet


def _mismatched(found: dict[str, str]) -> list[Finding]:
    """Return findings about plugins whose version differs from jaxlib's: JAX may load them with only a warning."""
    return [
        Finding(
            "versions",
            "wrong",
            f"{name} is {version}, and jaxlib {found['jaxlib']}: they must be equal",
            f"pip install 'jax[{name.split('-')[1]}]=={found['jax']}'",
        )
        for name, version in found.items()
        if _PLUGIN.fullmatch(name) and version != found["jaxlib"]
    ]


def _old_driver(found: dict[str, str]) -> list[Finding]:
    """Return a finding if NVIDIA's driver is too old for the CUDA of JAX's plugin."""
    cuda = next((match[1] for name in found if (match := re.fullmatch(r"jax-cuda(\d+)-plugin", name))), None)
    record = _DRIVER.read_text(encoding="utf-8", errors="replace") if _DRIVER.is_file() else ""
    driver = next(iter(re.findall(r"\s(\d{3}\.[\d.]+)\s", record)), None)  # such as "580.65.06"
    if cuda not in _OLDEST_DRIVER or driver is None or int(driver.partition(".")[0]) >= _OLDEST_DRIVER[cuda]:
        return []
    text = f"the NVIDIA driver is {driver}; CUDA {cuda} needs {_OLDEST_DRIVER[cuda]} or newer"
    other = ", or pip install 'jax[cuda12]' without cuda13" if cuda == "13" else ""
    return [Finding("versions", "wrong", text, f"install a newer driver{other}")]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


# The disk.

LITTLE_ROOM = 2**30
FEW_INODES = 10_000  # a checkpoint has tens of files per process


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.exists())


def examine_disk(folder: Path) -> list[Finding]:
    """Check space, inodes and writing; write and remove a file."""
    folder = existing(folder)
    status = os.statvfs(folder)
    mend = f"remove small files (du --inodes -x {folder} | sort -n | tail), or choose another --run-dir"
    found = f"{status.f_favail:,} free of {status.f_files:,} at {folder}"
    inodes = Finding.judged("inodes", found, mend, wrong=status.f_favail < FEW_INODES)
    if not status.f_files:  # Btrfs and some network file systems have no fixed number
        inodes = Finding("inodes", "ok", f"without a limit at {folder}")
    return [examine_room(folder), inodes, _writing(folder)]


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
