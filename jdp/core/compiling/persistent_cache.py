"""Keep XLA's compiled programs on disk: a process that starts the same program again compiles nothing.

The store is JAX's persistent compilation cache. A program is code that this process runs, so a folder that others may
write to is not used. The folder's name depends on the processor's features: machine code depends on them, but JAX's own
key does not. Several hosts need one folder that all processes reach. XLA divides the search for the best GPU kernels
among the processes, so a process that compiles would wait for ever for a process that found its program on disk.
"""

import contextlib
import hashlib
import os
import platform
import secrets
import socket
import threading
from collections.abc import Generator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jdp.base.disk_cache import default_folder, make_folder, others_may_write, without_home
from jdp.base.errors import UserError, public
from jdp.base.machine import text_of
from jdp.base.notices import notice, warn
from jdp.base.user_path import user_path
from jdp.base.words import is_integer
from jdp.core.cluster.barrier import from_every_process, from_first_process, joined_as, meet

LIMIT_BYTES = 2**30
"""For all programs together: about a thousand programs of small models, or dozens of large ones."""
SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0.05,  # reading a program takes a tenth of that
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_enable_xla_caches": "none",  # XLA's own caches have no limit
}
"""JAX's settings, unless the environment sets them."""
_SWITCH = threading.Lock()
_wanted: list[bool] = []
"""For each open context of `without_kept_programs`, the setting before it: the first is the user's."""


def kept_in() -> Path | None:
    """Return the folder of compiled programs; None if they are not kept."""
    wanted: bool = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    chosen: str | None = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    return Path(chosen) if wanted and chosen else None


@public()
def keep_programs(folder: str | Path | None = None, *, limit_bytes: int = LIMIT_BYTES) -> Path | None:
    """Keep compiled programs on disk from now on, and read existing ones: a second start compiles nothing.

        >>> folder = jdp.keep_programs("programs")  # before anything is compiled

    `jdp train` and `jdp launch` do so. Call it once, after `jdp.initialize()`, before anything is compiled, the same on
    every process. It sets JAX's persistent compilation cache.

    Args:
        folder: a folder for the programs; None: `programs` in $JDP_CACHE_DIR, else in ~/.cache/jdp. They are in a
            subfolder named after the processor. Several hosts need a folder that all share, or $JDP_CACHE_DIR.
        limit_bytes: beyond it the least recently used programs are deleted. Raise it when large models fill the folder.

    Returns:
        The folder of this processor. A folder that JAX already has, by a call or by JAX_COMPILATION_CACHE_DIR, stays.
        None if JAX_ENABLE_COMPILATION_CACHE is off. None also, and reported, if the folder cannot be made, others may
        write to it, the run is on several hosts that share none, or its processors differ.

    Raises:
        ValueError: an impossible path, or a limit that is not a positive integer.
    """
    if not is_integer(limit_bytes) or limit_bytes < 1:
        raise UserError(f"limit_bytes is a number of bytes, at least 1; given {limit_bytes!r}. Give 2**30.")
    processor = hashlib.sha256(_processor().encode()).hexdigest()[:16]
    chosen = folder is not None or "JDP_CACHE_DIR" in os.environ
    store = (default_folder() / "programs" if folder is None else user_path(folder)).absolute() / processor
    wanted: bool = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    why = _why_not(store) if wanted and not kept_in() else ""
    why = _why_not_together(store, why, chosen, processor)
    if not wanted or kept_in():
        return kept_in()
    if home := without_home(store):
        notice(f"{home}; set JDP_CACHE_DIR to a folder that can be written")
        return None
    if why:
        warn(f"compiled programs are not kept for the next start: {why}")
        return None
    for name, value in {**SETTINGS, "jax_compilation_cache_max_size": limit_bytes}.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    jax.config.update("jax_compilation_cache_dir", str(store))
    return store


def _why_not(folder: Path) -> str:
    """Make the folder; return why programs must not be kept in it, or "" if they may."""
    try:
        make_folder(folder, 0o700)
    except OSError as error:
        return f"{folder} cannot be made ({error.strerror})"
    others = others_may_write(folder) or others_may_write(folder.parent)
    return f"others could put code among them: {others}" if others else ""


def _why_not_together(folder: Path, why: str, chosen: bool, processor: str) -> str:
    """Return why the processes of this run, which all call this, cannot share the folder; for one process, `why`."""
    joined = joined_as()
    if joined is None or joined[1] == 1:
        return why
    mark = folder / f".{from_first_process('the name of a shared file', secrets.token_hex(8))}"
    if not why and joined[0] == 0:
        with contextlib.suppress(OSError):
            mark.touch()
    meet("compiled programs are looked for")
    own = f"{socket.gethostname()} {processor} {why or ('' if mark.exists() else 'no mark')}"
    found = [word.split(" ", 2) for word in from_every_process("compiled programs are shared", own)]
    if joined[0] == 0:
        mark.unlink(missing_ok=True)
    hosts, processors, reasons = map(set, zip(*found, strict=True))
    if len(hosts) > 1 and not chosen:
        return "the run is on several hosts: set JDP_CACHE_DIR to a folder that all of them share"
    if len(processors) > 1:
        return "the processors of this run's hosts differ, and machine code of one may not run on another"
    if reasons != {""}:
        return why or f"not all processes of this run reach {folder}: set JDP_CACHE_DIR to a folder that they share"
    return ""


@contextlib.contextmanager
def without_kept_programs() -> Generator[None]:
    """Compile without reading or writing programs on disk, in all threads of this process.

    JAX would write programs of described devices, which no process can read again, and warn of each at its next
    compilation. Programs from disk also come without XLA's warnings.
    """
    with _SWITCH:
        _wanted.append(jax.config.jax_enable_compilation_cache)  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX reads the setting only once
    try:
        yield
    finally:
        with _SWITCH:
            wanted = _wanted.pop()
            if not _wanted:  # the last context to exit
                jax.config.update("jax_enable_compilation_cache", wanted)
                compilation_cache.reset_cache()


def _processor() -> str:
    """Return the features of this processor that machine code may use."""
    lines = text_of("/proc/cpuinfo").split("\n\n")[0].splitlines()
    features = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    return "\n".join([platform.machine(), *features])
