"""Versions of jdp's requirements, JAX, jaxlib and plugins by pip's records; JAX is not imported."""

import importlib.metadata
import platform
import re
from pathlib import Path

from packaging.requirements import Requirement

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
    """Return findings about unmet requirements of a package."""
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
    driver = driver_version()
    if cuda not in _OLDEST_DRIVER or driver is None or int(driver.partition(".")[0]) >= _OLDEST_DRIVER[cuda]:
        return []
    text = f"the NVIDIA driver is {driver}; CUDA {cuda} needs {_OLDEST_DRIVER[cuda]} or newer"
    other = ", or pip install 'jax[cuda12]' without cuda13" if cuda == "13" else ""
    return [Finding("versions", "wrong", text, f"install a newer driver{other}")]


def driver_version() -> str | None:
    """Return the version of NVIDIA's kernel driver, such as "580.65.06"; None if there is none."""
    try:
        match = re.search(r"\s(\d{3}\.[\d.]+)\s", _DRIVER.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return match[1] if match else None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
