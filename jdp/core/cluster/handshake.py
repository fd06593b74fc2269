"""The handshake at the start: processes that were not started alike end at once, all with the same message.

JAX accepts processes with different versions or numbers of devices, and then hangs or computes something else. Versions
and jdp's own source are compared on joining, the numbers of devices when JAX has them, and by `jdp train` the
experiment, line by line. The program is compared before the first step (`batch`).
"""

import hashlib
import importlib.metadata
import platform
from collections import Counter
from pathlib import Path

import jax

from jdp.base.tree_paths import PACKAGE
from jdp.core.cluster.agreement import Fact, Mismatch, agree_all
from jdp.core.cluster.barrier import named

_PACKAGES = ("jax", "jaxlib", "numpy")


def check_environment() -> None:
    """Compare this process' versions with all others', right after joining."""
    install = "Install the same on every machine, and start every process from the same environment."
    versions = [Fact("Python's version", ".".join(platform.python_version_tuple()[:2]), install)]
    versions += [Fact(f"The version of {name}", importlib.metadata.version(name), install) for name in _PACKAGES]
    source = Fact("jdp's source", _source(PACKAGE), f"One process has another copy of jdp. {install}")
    agree_all("jdp.initialize", [*versions, source])


def check_device_counts() -> None:
    """Check that every process has as many devices as the others."""
    have = Counter(device.process_index for device in jax.devices())
    counts = {process: have[process] for process in range(jax.process_count())}
    groups = Counter(counts.values())
    if len(groups) == 1:
        return
    usual = max(groups, key=lambda count: (groups[count], count == counts[0]))
    differ = [process for process, count in counts.items() if count != usual]
    raise Mismatch(
        f"Every process must have as many devices as the others; given {named(differ)} with "
        f"{', '.join(str(counts[process]) for process in differ[:3])}, the others with {usual}. Give all the same "
        "--devices-per-process, or as many GPUs (CUDA_VISIBLE_DEVICES, --gpus-per-task)."
    )


def check_experiment(text: str, *, plugin: Path | None = None) -> None:
    """Compare the experiment that this process will run with all others'."""
    fix = "Start every process with the same file and the same options."
    facts = [Fact("The experiment", text, fix)]
    if plugin is not None:
        facts.append(Fact("The plug-in's source", _source(plugin), "Install the same plug-in on every machine."))
    agree_all("jdp train", facts)


def _source(package: Path) -> str:
    """Return a digest of a package's Python files, or of one file: copies of one version may differ."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(package.rglob("*.py")) if package.is_dir() else [package]:
        digest.update(f"{file.relative_to(package)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
